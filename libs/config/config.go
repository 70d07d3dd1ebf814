// Package config is the configuration of rolloutd itself: where it listens, what it hosts, where its peers are. (What a run is
// configured with is another thing: rollout.config.v1.)
//
// Sources, each over the one before: defaults, a TOML file, ROLLOUTD_* variables, flags. The key "nats.url" is the same setting in
// all of them: [nats] url, ROLLOUTD_NATS_URL, --nats-url. A key that is not known is an error everywhere.
package config

import (
	"path/filepath"
	"time"
)

// Config is the configuration with every default filled in and every path absolute.
type Config struct {
	StateDir  string        `toml:"state_dir"`
	SharedDir string        `toml:"shared_dir"`
	Target    []string      `toml:"target"`
	Join      string        `toml:"join"`
	TokenFile string        `toml:"token_file"`
	Listen    string        `toml:"listen"`
	Host      string        `toml:"advertise_host"`
	Insecure  bool          `toml:"insecure_listen"`
	Drain     time.Duration `toml:"drain"`
	Gateway   Gateway       `toml:"gateway"`
	NATS      NATS          `toml:"nats"`
	Consul    Consul        `toml:"consul"`
	Blob      Blob          `toml:"blob"`
	Buffer    Buffer        `toml:"buffer"`
	Database  Database      `toml:"database"`
	TLS       TLS           `toml:"tls"`
	Log       Log           `toml:"log"`
	Worker    Worker        `toml:"worker"`
}

// Gateway is the OpenAI-compatible HTTP endpoint.
type Gateway struct {
	Listen      string `toml:"listen"`
	APIKeysFile string `toml:"api_keys_file"`
}

// NATS is the bus: the servers at URL, that of the joined process, or the target "nats" of this one. A token, a user with a password
// and an NKEY are alternatives; each comes by file or variable.
type NATS struct {
	URL          string `toml:"url"`
	TokenFile    string `toml:"token_file"`
	TokenEnv     string `toml:"token_env"`
	User         string `toml:"user"`
	PasswordFile string `toml:"password_file"`
	PasswordEnv  string `toml:"password_env"`
	NKeyFile     string `toml:"nkey_file"`
	CAFile       string `toml:"ca_file"`
	CertFile     string `toml:"cert_file"`
	KeyFile      string `toml:"key_file"`
	Replicas     int    `toml:"replicas"`
	Listen       string `toml:"listen"`
	Sync         bool   `toml:"sync"`
}

// Consul is discovery: the agent at Address, that of the joined process, or the target "registry" of this one.
type Consul struct {
	Address   string `toml:"address"`
	TokenFile string `toml:"token_file"`
	TokenEnv  string `toml:"token_env"`
	CAFile    string `toml:"ca_file"`
	Listen    string `toml:"listen"`
}

// Blob is where artifacts and payloads are kept: files below the state folder, or a bucket at URL. Secrets come by file or variable.
type Blob struct {
	URL             string `toml:"url"`
	Endpoint        string `toml:"endpoint"`
	Region          string `toml:"region"`
	AccessKey       string `toml:"access_key"`
	SecretKeyFile   string `toml:"secret_key_file"`
	SecretKeyEnv    string `toml:"secret_key_env"`
	CredentialsFile string `toml:"credentials_file"`
}

// Buffer is how samples lie on the disk.
type Buffer struct {
	SegmentBytes int `toml:"segment_bytes"`
}

// Database is where the services keep their state: SQLite files below the state folder, or, where one of the three URLs is set, one
// PostgreSQL database with a schema and a role for each service. A password comes by URLFile or URLEnv alone.
type Database struct {
	URL              string `toml:"url"`
	URLFile          string `toml:"url_file"`
	URLEnv           string `toml:"url_env"`
	SchemaPrefix     string `toml:"schema_prefix"`
	MaxConnections   int    `toml:"max_connections"`
	StatementTimeout int    `toml:"statement_timeout_s"`
}

// TLS are PEM files of the gRPC listener and of the authority that peers are checked against.
type TLS struct {
	CertFile string `toml:"cert_file"`
	KeyFile  string `toml:"key_file"`
	CAFile   string `toml:"ca_file"`
}

// Log is the process's own log, on standard error.
type Log struct {
	Format string `toml:"format"`
	Level  string `toml:"level"`
}

// Worker is how worker processes are started. An empty command or interpreter is looked up beside rolloutd, then on PATH.
type Worker struct {
	Command       []string `toml:"command"`
	Python        string   `toml:"python"`
	Cores         int      `toml:"cores"`
	ResumeOnStart bool     `toml:"resume_on_start"`
}

// Default is the configuration without any source. state is the state folder.
func Default(state string) Config {
	return Config{
		StateDir: state,
		Target:   []string{"all"},
		Listen:   "127.0.0.1:0",
		Drain:    15 * time.Second,
		Gateway:  Gateway{Listen: "127.0.0.1:0"},
		NATS:     NATS{Listen: "127.0.0.1:0"},
		Consul:   Consul{Listen: "127.0.0.1:0"},
		Database: Database{SchemaPrefix: "rollout", MaxConnections: 8, StatementTimeout: 30},
		Log:      Log{Format: "text", Level: "info"},
	}
}

// RuntimeFile is where the process says how to reach it.
func (c Config) RuntimeFile() string { return RuntimeFile(c.StateDir) }

// RuntimeFile is the file of the process that owns a state folder.
func RuntimeFile(stateDir string) string { return filepath.Join(stateDir, "rolloutd.json") }
