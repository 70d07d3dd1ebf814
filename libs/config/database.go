package config

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

var schemaPrefix = regexp.MustCompile(`^[a-z][a-z0-9_]{0,30}$`)

// check reports what is wrong with the keys. It never repeats an URL that holds a password.
func (d Database) check() (errs []error) {
	if reference(d.URL) {
		if err := (Ref{d.URL}).check(); err != nil {
			errs = append(errs, fmt.Errorf("database.url: %w", err))
		}
	} else if d.URL != "" {
		if u, err := parsePostgres(d.URL); err != nil {
			errs = append(errs, fmt.Errorf("database.url: %w", err))
		} else if _, has := u.User.Password(); has || hasPassword(u) {
			errs = append(errs, errors.New(`database.url: it holds a password; put the whole URL into a file (chmod 600) and write url = "file:PATH", `+
				`or into a variable and write url = "env:NAME"`))
		}
	}
	if !schemaPrefix.MatchString(d.SchemaPrefix) {
		errs = append(errs, fmt.Errorf("database.schema_prefix: %q is not a name of at most 31 characters of a-z, 0-9 and _", d.SchemaPrefix))
	}
	if d.MaxConnections < 2 {
		errs = append(errs, fmt.Errorf("database.max_connections: %d is too few; a service reads while it writes, give it at least 2", d.MaxConnections))
	}
	if d.StatementTimeout < 1 {
		errs = append(errs, fmt.Errorf("database.statement_timeout_s: %d is below 1", d.StatementTimeout))
	}
	return errs
}

// Postgres returns the URL of the PostgreSQL database from its configured place; "" means SQLite.
// The URL may contain a password, so it is for the driver only, and never for a log or a file.
// environ is os.Environ().
func (d Database) Postgres(environ []string) (string, error) {
	text, err := d.URL, error(nil)
	if reference(text) {
		text, err = Ref{text}.Read("database.url", environ)
	}
	if err != nil || text == "" {
		return "", err
	}
	if _, err := parsePostgres(text); err != nil {
		return "", fmt.Errorf("database.url: %w", err)
	}
	return text, nil
}

// reference reports whether a value is a reference instead of a URL.
func reference(text string) bool {
	kind, _, _ := strings.Cut(text, ":")
	return kind == "env" || kind == "file"
}

func parsePostgres(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || !slices.Contains([]string{"postgres", "postgresql"}, u.Scheme) || u.Host == "" && u.Query().Get("host") == "" {
		return nil, errors.New("not a PostgreSQL URL; write postgres://user@host:5432/name") // not err, which repeats the text
	}
	return u, nil
}

func hasPassword(u *url.URL) bool {
	for name := range u.Query() {
		if strings.Contains(strings.ToLower(name), "password") {
			return true
		}
	}
	return false
}
