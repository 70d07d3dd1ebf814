package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Ref is a reference to a secret, because a configuration never contains one: "env:NAME" is a
// variable, "file:PATH" a file that only its owner may read. The zero value means no secret. A Ref
// may be logged, the secret may not.
type Ref struct{ text string }

// File is a reference to a file.
func File(path string) Ref { return Ref{"file:" + path} }

// Env is a reference to a variable.
func Env(name string) Ref { return Ref{"env:" + name} }

// String returns the form that UnmarshalText reads.
func (r Ref) String() string { return r.text }

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// ErrLiteral reports a secret in place of a reference to one. It does not repeat the secret.
var ErrLiteral = errors.New(`no secret stands in a configuration: put it in a file (chmod 600) and write "file:PATH", or in a variable and write "env:NAME"`)

// UnmarshalText refuses everything except a reference.
func (r *Ref) UnmarshalText(text []byte) error {
	got := Ref{strings.TrimSpace(string(text))}
	if err := got.check(); err != nil {
		return err
	}
	*r = got
	return nil
}

// ErrSecret means that a secret is missing, or that other users can read it.
var ErrSecret = rpcerr.New(codes.NotFound, "SECRET_MISSING", "a secret is not where the configuration says")

func (r Ref) check() error {
	kind, rest, _ := strings.Cut(r.text, ":")
	switch {
	case r == Ref{}, kind == "file" && rest != "", kind == "env" && variableName.MatchString(rest):
		return nil
	case kind == "env":
		return errors.New(`after "env:" comes the name of a variable`)
	case kind == "file":
		return errors.New(`after "file:" comes a path`)
	}
	return ErrLiteral
}

// absolute makes the path of a file independent of the folder that the process is in.
func (r *Ref) absolute() error {
	path, ok := strings.CutPrefix(r.text, "file:")
	if !ok {
		return nil
	}
	path, err := filepath.Abs(path)
	*r = File(path)
	return err
}

// Read returns the secret, or "" for the zero value. key is the setting's name for errors, such as
// "nats.token". environ is os.Environ(). Do not write the result to a log, event, or file.
func (r Ref) Read(key string, environ []string) (string, error) {
	if err := r.check(); err != nil {
		return "", fmt.Errorf("%s: %w", key, err)
	}
	kind, rest, _ := strings.Cut(r.text, ":")
	switch kind {
	case "env":
		text := strings.TrimSpace(environment(environ)[rest])
		if text == "" {
			return "", ErrSecret.WithMessage("%s: the variable %s is not set or empty", key, rest).Fix("set it for this process: `export " + rest + "=...`")
		}
		return text, nil
	case "file":
		data, err := os.ReadFile(rest)
		if err != nil {
			return "", ErrSecret.WithMessage("%s", key).Wrap(err).Fix("write the secret into that file and `chmod 600` it, or name another one")
		}
		if info, err := os.Stat(rest); err == nil && info.Mode().Perm()&0o077 != 0 {
			return "", ErrSecret.WithMessage("%s: others may read %s; chmod 600 it", key, rest).Fix("chmod 600 " + rest)
		}
		text := strings.TrimSpace(string(data))
		if text == "" {
			return "", ErrSecret.WithMessage("%s: %s is empty", key, rest).Fix("write the secret into it")
		}
		return text, nil
	}
	return "", nil
}

// Variable is the name of the variable that the secret is in.
func (r Ref) Variable() (name string, ok bool) { return strings.CutPrefix(r.text, "env:") }

// Secret is a configuration key with a reference to a secret.
type Secret struct {
	Key string // "nats.token"
	Ref Ref
}

// Secrets are all secrets that the configuration refers to.
func (c Config) Secrets() (out []Secret) {
	for _, k := range keys {
		if r, ok := k.field(&c).(*Ref); ok && *r != (Ref{}) {
			out = append(out, Secret{k.name, *r})
		}
	}
	if reference(c.Database.URL) {
		out = append(out, Secret{"database.url", Ref{c.Database.URL}})
	}
	return out
}

// apiKeys is what replaces files of API keys.
const apiKeys = "nothing: API keys are in the database of the gateway; move the file to api-keys.json in the state folder of the gateway, which imports it when it starts"

// replaced maps removed keys to those that replace them. A reference says whether it is a file or a
// variable.
var replaced = map[string]string{
	"api_keys_file": apiKeys, "gateway.api_keys_file": apiKeys,
	"nats.token_file": `nats.token = "file:PATH"`, "nats.token_env": `nats.token = "env:NAME"`,
	"nats.password_file": `nats.password = "file:PATH"`, "nats.password_env": `nats.password = "env:NAME"`,
	"nats.nkey_file":    `nats.nkey = "file:PATH"`,
	"consul.token_file": `consul.token = "file:PATH"`, "consul.token_env": `consul.token = "env:NAME"`,
	"blob.secret_key_file": `blob.secret_key = "file:PATH"`, "blob.secret_key_env": `blob.secret_key = "env:NAME"`,
	"blob.credentials_file": `blob.credentials = "file:PATH"`,
	"database.url_file":     `database.url = "file:PATH"`, "database.url_env": `database.url = "env:NAME"`,
}

// replacedBy returns the current name of a renamed setting, in the form of its source, or "".
func replacedBy(name string, shape func(key) string) string {
	for before, now := range replaced {
		if shape(key{name: before}) == name {
			return now
		}
	}
	return ""
}
