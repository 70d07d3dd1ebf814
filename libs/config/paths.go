package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// paths returns the fields that contain a path. Paths inside references are in Refs.
func (c *Config) paths() []*string {
	return []*string{
		&c.StateDir, &c.SharedDir, &c.Join, &c.TokenFile,
		&c.NATS.CAFile, &c.NATS.CertFile, &c.NATS.KeyFile, &c.Consul.CAFile, &c.Consul.CertFile, &c.Consul.KeyFile,
		&c.TLS.CertFile, &c.TLS.KeyFile, &c.TLS.CAFile, &c.TLS.WorkerCertFile, &c.TLS.WorkerKeyFile,
	}
}

// place makes the paths of a file absolute: "~/" is the home folder, other paths are relative to
// the file's folder, regardless of the working directory.
func (c *Config) place(file string, env map[string]string) error {
	folder, err := filepath.Abs(filepath.Dir(file))
	if err != nil {
		return fmt.Errorf("path %q: %w", file, err)
	}
	for _, p := range c.paths() {
		*p = placed(*p, folder, env)
	}
	refs := []*string{&c.Database.URL}
	for _, k := range keys {
		if r, ok := k.field(c).(*Ref); ok {
			refs = append(refs, &r.text)
		}
	}
	for _, r := range refs {
		if path, ok := strings.CutPrefix(*r, "file:"); ok {
			*r = "file:" + placed(path, folder, env)
		}
	}
	return nil
}

func placed(path, folder string, env map[string]string) string {
	if path == "" || filepath.IsAbs(path) {
		return path
	}
	if rest, ok := strings.CutPrefix(path, "~/"); ok && env["HOME"] != "" {
		return filepath.Join(env["HOME"], rest)
	}
	return filepath.Join(folder, path)
}

func defaultFile(env map[string]string) string {
	return filepath.Join(configHome(env), "rollout", "rolloutd.toml")
}

// stateDirOfFile returns the state folder that the default file names, or "". Load reports the
// errors of the file.
func stateDirOfFile(env map[string]string) string {
	path := defaultFile(env)
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	var file struct {
		StateDir string `toml:"state_dir"`
	}
	if toml.Unmarshal(data, &file) != nil {
		return ""
	}
	folder, err := filepath.Abs(filepath.Dir(path))
	if err != nil {
		return ""
	}
	return placed(file.StateDir, folder, env)
}
