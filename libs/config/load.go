package config

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/rollout-rl/rollout/libs/nearest"
)

// Load reads every source. args are the command line without the program's name, environ is
// os.Environ(). With -h or --help it writes the help to out and returns flag.ErrHelp. Errors name
// the source and, in a file, the line.
func Load(args, environ []string, out io.Writer) (Config, error) {
	env := environment(environ)
	state, err := defaultState(env)
	if err != nil {
		return Config{}, err
	}
	c := Default(state)
	flags, file := newFlags(&c, out)
	if err := flags.Parse(args); err != nil {
		for _, arg := range args {
			name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
			if now := replacedBy(name, key.flag); now != "" {
				return Config{}, fmt.Errorf("flag --%s: write %s", name, now)
			}
		}
		return Config{}, err
	}
	if rest := flags.Args(); len(rest) > 0 {
		return Config{}, fmt.Errorf("unexpected argument %q; every setting is a flag, see --help", rest[0])
	}
	if err := fromFile(&c, *file, env); err != nil {
		return Config{}, err
	}
	if err := fromEnvironment(&c, env); err != nil {
		return Config{}, err
	}
	var flagErrs []error
	flags.Visit(func(f *flag.Flag) { // again, now over the file and the variables
		if k, ok := byFlag(f.Name); ok {
			if err := k.set(&c, f.Value.String()); err != nil {
				flagErrs = append(flagErrs, fmt.Errorf("flag --%s: %w", f.Name, err))
			}
		}
	})
	if err := errors.Join(flagErrs...); err != nil {
		return Config{}, err
	}
	return c.finish()
}

// newFlags declares a flag for each key. Values are kept as text and set last.
func newFlags(c *Config, out io.Writer) (*flag.FlagSet, *string) {
	flags := flag.NewFlagSet("rolloutd", flag.ContinueOnError)
	flags.SetOutput(out)
	file := flags.String("config", "", "TOML file; default: $XDG_CONFIG_HOME/rollout/rolloutd.toml where it is there")
	for _, k := range keys {
		flags.Var(&flagValue{key: k, text: k.get(c)}, k.flag(), k.usage+" ("+k.env()+")")
	}
	return flags, file
}

// flagValue checks a flag's text when it is parsed.
type flagValue struct {
	key  key
	text string
}

func (v *flagValue) String() string { return v.text }

func (v *flagValue) Set(text string) error {
	v.text = text
	if _, secret := v.key.field(&Config{}).(*Ref); secret {
		return nil // package flag would repeat the error; Load checks the value
	}
	return v.key.set(&Config{}, text)
}

// IsBoolFlag makes --nats-sync valid without a value.
func (v *flagValue) IsBoolFlag() bool {
	if v.key.field == nil {
		return false
	}
	_, ok := v.key.field(&Config{}).(*bool)
	return ok
}

func byFlag(name string) (key, bool) {
	for _, k := range keys {
		if k.flag() == name {
			return k, true
		}
	}
	return key{}, false
}

func fromFile(c *Config, path string, env map[string]string) error {
	named := path != ""
	if !named {
		path = defaultFile(env)
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && !named {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	type file struct { // durations are text in TOML
		Config
		Drain string `toml:"drain"`
	}
	f := file{Config: *c}
	d := toml.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		if name := number(data); name != "" {
			wanted, fix := expected(name)
			return fmt.Errorf("%s: %s: expected %s; write %s", path, name, wanted, fix)
		}
		return fileError(path, err)
	}
	if f.Drain != "" {
		if f.Config.Drain, err = time.ParseDuration(f.Drain); err != nil {
			return fmt.Errorf("%s: drain: %q is not a duration; write \"15s\"", path, f.Drain)
		}
	} else {
		f.Config.Drain = c.Drain
	}
	if !named && env["ROLLOUT_STATE_DIR"] != "" { // StateDir reads it too: a variable overrides the file
		f.StateDir = c.StateDir
	}
	*c = f.Config
	return c.place(path, env)
}

func fileError(path string, err error) error {
	var unknown *toml.StrictMissingError
	var syntax *toml.DecodeError
	switch {
	case errors.As(err, &unknown):
		var errs []error
		for _, e := range unknown.Errors {
			row, column := e.Position()
			name := strings.Join(e.Key(), ".")
			if now := replaced[name]; now != "" {
				errs = append(errs, fmt.Errorf("%s:%d:%d: %s is now %s", path, row, column, name, now))
				continue
			}
			errs = append(errs, fmt.Errorf("%s:%d:%d: unknown key %q; %s", path, row, column, name, meant(name, names(), "")))
		}
		return errors.Join(errs...)
	case errors.As(err, &syntax):
		row, column := syntax.Position()
		text := strings.TrimPrefix(err.Error(), "toml: ")
		if name := strings.Join(syntax.Key(), "."); name != "" {
			text = name + ": " + mistyped(name, text)
		}
		return fmt.Errorf("%s:%d:%d: %s", path, row, column, text)
	}
	return fmt.Errorf("%s: %w", path, err)
}

func fromEnvironment(c *Config, env map[string]string) error {
	known := map[string]key{}
	for _, k := range keys {
		known[k.env()] = k
	}
	var errs []error
	for name, value := range env {
		if !strings.HasPrefix(name, envPrefix) {
			continue
		}
		k, ok := known[name]
		if !ok {
			if now := replacedBy(name, key.env); now != "" {
				errs = append(errs, fmt.Errorf("variable %s: write %s", name, now))
				continue
			}
			errs = append(errs, fmt.Errorf("unknown variable %s; %s", name, meant(strings.TrimPrefix(name, envPrefix), variables(), envPrefix)))
			continue
		}
		if err := k.set(c, value); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func names() (out []string) {
	for _, k := range keys {
		out = append(out, k.name)
	}
	return out
}

func variables() (out []string) {
	for _, k := range keys {
		out = append(out, strings.TrimPrefix(k.env(), envPrefix))
	}
	return out
}

// meant is the suggestion for an unknown name, without the common prefix: the closest name, else
// all of its table, else all.
func meant(name string, there []string, prefix string) string {
	if near := nearest.To(name, there); near != "" {
		return fmt.Sprintf("did you mean `%s%s`?", prefix, near)
	}
	if at := strings.LastIndex(name, "."); at > 0 {
		others := slices.DeleteFunc(slices.Clone(there), func(other string) bool { return !strings.HasPrefix(other, name[:at+1]) })
		if len(others) > 0 {
			there = others
		}
	}
	return "there are " + prefix + strings.Join(there, ", "+prefix)
}

func environment(environ []string) map[string]string {
	env := map[string]string{}
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		env[name] = value
	}
	return env
}

// StateDir returns the state folder according to environ: $ROLLOUT_STATE_DIR, that of the default
// configuration file, $XDG_STATE_HOME/rollout, or ~/.local/state/rollout. The CLI and rolloutd use
// the same one.
func StateDir(environ []string) (string, error) {
	env := environment(environ)
	if env["ROLLOUT_STATE_DIR"] == "" {
		if dir := stateDirOfFile(env); dir != "" {
			return dir, nil
		}
	}
	return defaultState(env)
}

func defaultState(env map[string]string) (string, error) {
	switch {
	case env["ROLLOUT_STATE_DIR"] != "":
		return filepath.Abs(env["ROLLOUT_STATE_DIR"])
	case filepath.IsAbs(env["XDG_STATE_HOME"]):
		return filepath.Join(env["XDG_STATE_HOME"], "rollout"), nil
	case env["HOME"] != "":
		return filepath.Join(env["HOME"], ".local", "state", "rollout"), nil
	}
	return "", errors.New("no state folder: set --state-dir, ROLLOUT_STATE_DIR, XDG_STATE_HOME or HOME")
}

func configHome(env map[string]string) string {
	if filepath.IsAbs(env["XDG_CONFIG_HOME"]) {
		return env["XDG_CONFIG_HOME"]
	}
	return filepath.Join(env["HOME"], ".config")
}
