package config

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
)

var schemaPrefix = regexp.MustCompile(`^[a-z][a-z0-9_]{0,30}$`)

// check reports what is wrong with the keys. It never repeats an URL that holds a password.
func (d Database) check() (errs []error) {
	set := 0
	for _, text := range []string{d.URL, d.URLFile, d.URLEnv} {
		if text != "" {
			set++
		}
	}
	if set > 1 {
		errs = append(errs, errors.New("database: url, url_file and url_env name the same thing; set one of them"))
	}
	if d.URL != "" {
		if u, err := parsePostgres(d.URL); err != nil {
			errs = append(errs, fmt.Errorf("database.url: %w", err))
		} else if _, has := u.User.Password(); has || hasPassword(u) {
			errs = append(errs, errors.New("database.url: it holds a password; put the whole URL into a file (0600) and name it in database.url_file, "+
				"or into a variable and name that in database.url_env"))
		}
	}
	if !schemaPrefix.MatchString(d.SchemaPrefix) {
		errs = append(errs, fmt.Errorf("database.schema_prefix: %q is no name of at most 31 of a-z, 0-9 and _", d.SchemaPrefix))
	}
	if d.MaxConnections < 2 {
		errs = append(errs, fmt.Errorf("database.max_connections: %d is too few; a service reads while it writes, give it at least 2", d.MaxConnections))
	}
	if d.StatementTimeout < 1 {
		errs = append(errs, fmt.Errorf("database.statement_timeout_s: %d is below 1", d.StatementTimeout))
	}
	return errs
}

// Postgres is the URL of the PostgreSQL database, read from where the configuration says; "" means SQLite. It may hold a
// password: it is for the driver, never for a log or a file. environ is os.Environ().
func (d Database) Postgres(environ []string) (string, error) {
	from, text := "database.url", d.URL
	switch {
	case d.URLEnv != "":
		from, text = "variable "+d.URLEnv+" (database.url_env)", environment(environ)[d.URLEnv]
	case d.URLFile != "":
		data, err := os.ReadFile(d.URLFile)
		if err != nil {
			return "", fmt.Errorf("database.url_file: %w", err)
		}
		if info, err := os.Stat(d.URLFile); err == nil && info.Mode().Perm()&0o077 != 0 {
			return "", fmt.Errorf("database.url_file: others may read %s; chmod 600 it", d.URLFile)
		}
		from, text = d.URLFile+" (database.url_file)", strings.TrimSpace(string(data))
	case d.URL == "":
		return "", nil
	}
	if text == "" {
		return "", fmt.Errorf("%s: is empty; it must hold postgres://user:password@host:5432/name", from)
	}
	if _, err := parsePostgres(text); err != nil {
		return "", fmt.Errorf("%s: %w", from, err)
	}
	return text, nil
}

func parsePostgres(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || !slices.Contains([]string{"postgres", "postgresql"}, u.Scheme) || u.Host == "" && u.Query().Get("host") == "" {
		return nil, errors.New("it is no PostgreSQL URL; write postgres://user@host:5432/name") // not err, which repeats the text
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
