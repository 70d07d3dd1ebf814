// Package config is the configuration of rolloutd: its addresses, the services that it hosts, and
// its peers. (The configuration of a run is rollout.config.v1.)
//
// The sources, of which each overrides the previous ones: defaults, a TOML file, ROLLOUTD_*
// variables, flags. A key such as "nats.url" is the same setting in all of them: [nats] url,
// ROLLOUTD_NATS_URL, --nats-url. An unknown key is an error everywhere.
package config

import (
	"cmp"
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
	Retention Retention     `toml:"retention"`
	Database  Database      `toml:"database"`
	TLS       TLS           `toml:"tls"`
	Log       Log           `toml:"log"`
	Worker    Worker        `toml:"worker"`
	Launch    Launch        `toml:"launch"`
}

// Gateway is the OpenAI-compatible HTTP endpoint. It asks for an API key, except from the user of
// rolloutd and from root on loopback.
type Gateway struct {
	Listen     string `toml:"listen"`
	RequireKey bool   `toml:"require_key"`
}

// TrustsOwner reports whether the user of rolloutd and root need no API key.
func (g Gateway) TrustsOwner() bool { return !g.RequireKey && Loopback(g.Listen) }

// NATS is the bus: the servers at URL, that of the joined process, or the target "nats" of this
// one. A token, a user with a password and an NKEY are alternatives.
type NATS struct {
	URL      string `toml:"url"`
	Token    Ref    `toml:"token"`
	User     string `toml:"user"`
	Password Ref    `toml:"password"`
	NKey     Ref    `toml:"nkey"`
	CAFile   string `toml:"ca_file"`
	CertFile string `toml:"cert_file"`
	KeyFile  string `toml:"key_file"`
	Replicas int    `toml:"replicas"`
	Listen   string `toml:"listen"`
	Sync     bool   `toml:"sync"`
}

// Consul is discovery: the agent at Address, that of the joined process, or the target "registry"
// of this one.
type Consul struct {
	Address  string `toml:"address"`
	Token    Ref    `toml:"token"`
	CAFile   string `toml:"ca_file"`
	CertFile string `toml:"cert_file"`
	KeyFile  string `toml:"key_file"`
	Listen   string `toml:"listen"`
}

// Blob is where artifacts and payloads are kept: files below the state folder, or a bucket at URL.
type Blob struct {
	URL         string `toml:"url"`
	Endpoint    string `toml:"endpoint"`
	Region      string `toml:"region"`
	AccessKey   string `toml:"access_key"`
	SecretKey   Ref    `toml:"secret_key"`
	Credentials Ref    `toml:"credentials"`
}

// Buffer says how samples are stored on the disk.
type Buffer struct {
	SegmentBytes int    `toml:"segment_bytes"`
	Durability   string `toml:"durability"` // what acknowledged samples survive: "fsync" a power cut, "process" a kill of everything
}

// Retention says after how many days the scheduler deletes runs, by their last state, and the
// storage service events, and how many of the runs that have ended stay. 0: never, and all.
// Interrupted runs wait to be resumed, and are not deleted.
type Retention struct {
	SucceededDays int `toml:"succeeded_days"`
	FailedDays    int `toml:"failed_days"`
	CancelledDays int `toml:"cancelled_days"`
	EventsDays    int `toml:"events_days"`
	EndedRuns     int `toml:"ended_runs"`

	TelemetryRecentMinutes int `toml:"telemetry_recent_minutes"` // of each second
	TelemetryFineHours     int `toml:"telemetry_fine_hours"`     // of each ten seconds
}

// Days is a number of days as a duration.
func Days(n int) time.Duration { return time.Duration(n) * 24 * time.Hour }

// Database is the database in which the services store their state: SQLite files below the state
// folder, or one PostgreSQL database with a schema and a role for each service. URL is that of the
// database, without a password, or a reference (see Ref) to a URL with one.
type Database struct {
	URL              string `toml:"url"`
	SchemaPrefix     string `toml:"schema_prefix"`
	MaxConnections   int    `toml:"max_connections"`
	StatementTimeout int    `toml:"statement_timeout_s"`
}

// TLS has the paths of PEM files. With a certificate alone, the gRPC listener and a gateway beyond
// loopback use TLS. With an authority, TLS is mutual and used by all processes: services, the
// embedded NATS and registry, and workers. Workers use their own certificate if one is named, or
// else that of the process that starts them.
type TLS struct {
	CertFile       string `toml:"cert_file"`
	KeyFile        string `toml:"key_file"`
	CAFile         string `toml:"ca_file"`
	WorkerCertFile string `toml:"worker_cert_file"`
	WorkerKeyFile  string `toml:"worker_key_file"`
}

// Mutual reports whether both sides of each connection show a certificate.
func (t TLS) Mutual() bool { return t.CertFile != "" && t.CAFile != "" }

// Worker is the certificate that workers show, and its key.
func (t TLS) Worker() (cert, key string) {
	if t.WorkerCertFile != "" {
		return t.WorkerCertFile, t.WorkerKeyFile
	}
	return t.CertFile, t.KeyFile
}

// Log is the process's own log, on standard error.
type Log struct {
	Format string `toml:"format"`
	Level  string `toml:"level"`
}

// Worker is how worker processes are started. An empty command or interpreter is looked up in the
// folder of rolloutd, then on PATH.
type Worker struct {
	Command       []string `toml:"command"`
	Python        string   `toml:"python"`
	Cores         int      `toml:"cores"`
	Env           []string `toml:"env"` // variables that are passed on to workers although they are kept from them otherwise
	ResumeOnStart bool     `toml:"resume_on_start"`
	LogBytes      int      `toml:"log_bytes"`            // size at which a worker's log is rotated; one older file stays
	LogRate       int      `toml:"log_lines_per_second"` // lines of a worker that are written; others are counted
}

// Launch says who starts the workers of each kind.
type Launch struct {
	Kind        string      `toml:"kind"` // of the kinds of workers that name none
	Partition   string      `toml:"partition"`
	Account     string      `toml:"account"`
	TimeLimit   string      `toml:"time_limit"`
	Options     string      `toml:"options"`
	Learner     LaunchGroup `toml:"learner"`
	Inference   LaunchGroup `toml:"inference"`
	Reward      LaunchGroup `toml:"reward"`
	Environment LaunchGroup `toml:"environment"`
}

// LaunchGroup is what differs for the workers of one kind. All but the kind of the launcher is for
// Slurm.
type LaunchGroup struct {
	Kind      string `toml:"kind"`
	Partition string `toml:"partition"`
	Account   string `toml:"account"`
	TimeLimit string `toml:"time_limit"`
	Options   string `toml:"options"` // of sbatch, separated by spaces
	CPUs      int    `toml:"cpus"`
	GPUs      int    `toml:"gpus"`
	Memory    string `toml:"memory"`
}

// Launchers, the values of Launch.Kind.
const (
	LaunchLocal    = "local"    // child processes of the scheduler
	LaunchExternal = "external" // an operator starts them, and they join
	LaunchSlurm    = "slurm"    // jobs of a Slurm cluster
)

var launchers = []string{LaunchLocal, LaunchExternal, LaunchSlurm}

// Groups are the settings by kind of worker, with those of all kinds filled in.
func (l Launch) Groups() map[string]LaunchGroup {
	out := map[string]LaunchGroup{"learner": l.Learner, "inference": l.Inference, "reward": l.Reward, "environment": l.Environment}
	for worker, group := range out {
		group.Kind, group.Partition = cmp.Or(group.Kind, l.Kind), cmp.Or(group.Partition, l.Partition)
		group.Account, group.TimeLimit = cmp.Or(group.Account, l.Account), cmp.Or(group.TimeLimit, l.TimeLimit)
		group.Options = cmp.Or(group.Options, l.Options)
		out[worker] = group
	}
	return out
}

// Default is the configuration without any source. state is the state folder.
func Default(state string) Config {
	return Config{
		StateDir:  state,
		Target:    []string{"all"},
		Listen:    "127.0.0.1:0",
		Drain:     15 * time.Second,
		Gateway:   Gateway{Listen: "127.0.0.1:0"},
		NATS:      NATS{Listen: "127.0.0.1:0"},
		Consul:    Consul{Listen: "127.0.0.1:0"},
		Buffer:    Buffer{Durability: "fsync"},
		Retention: Retention{TelemetryRecentMinutes: 60, TelemetryFineHours: 24},
		Database:  Database{SchemaPrefix: "rollout", MaxConnections: 8, StatementTimeout: 30},
		Log:       Log{Format: "text", Level: "info"},
		Launch:    Launch{Kind: LaunchLocal},
		Worker:    Worker{LogBytes: 16 << 20, LogRate: 500},
	}
}

// RuntimeFile has the addresses and the token of a running process.
func (c Config) RuntimeFile() string { return RuntimeFile(c.StateDir) }

// RuntimeFile is the file of the process that owns a state folder.
func RuntimeFile(stateDir string) string { return filepath.Join(stateDir, "rolloutd.json") }
