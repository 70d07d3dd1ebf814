package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// key is one setting: its name in every source, what --help says, and the field.
type key struct {
	name  string // "nats.url"
	usage string
	field func(*Config) any // *string, *Ref, *bool, *int, *time.Duration or *[]string
}

// keys has every setting. A test compares it with the struct's TOML names.
var keys = append([]key{
	{"state_dir", "folder of databases, streams, artifacts and runs", func(c *Config) any { return &c.StateDir }},
	{"shared_dir", "folder of artifacts, segments and runs, the same for all replicas of a service; default: the state folder", func(c *Config) any { return &c.SharedDir }},
	{"target", "what this process hosts: all, or a comma list of the targets below", func(c *Config) any { return &c.Target }},
	{"join", "state folder of another rolloutd whose NATS, registry and token this one uses", func(c *Config) any { return &c.Join }},
	{"token_file", "file of the mesh token (0600); empty: token in the state folder, made where it is missing, or that of the joined process", func(c *Config) any { return &c.TokenFile }},
	{"listen", "gRPC address; port 0 takes a free one", func(c *Config) any { return &c.Listen }},
	{"advertise_host", "host under which peers reach this process; default: that of the gRPC address", func(c *Config) any { return &c.Host }},
	{"insecure_listen", "allow addresses that are not loopback in plain text: only on a private network", func(c *Config) any { return &c.Insecure }},
	{"drain", "time that calls and workers get at the end", func(c *Config) any { return &c.Drain }},
	{"gateway.listen", "HTTP address of the OpenAI-compatible endpoint", func(c *Config) any { return &c.Gateway.Listen }},
	{"gateway.require_key", "ask the user of rolloutd and root for an API key too, who need none on loopback (Linux); everyone else always needs one", func(c *Config) any { return &c.Gateway.RequireKey }},
	{"nats.url", "NATS server, or the nodes of a cluster separated by commas; tls:// asks for TLS; empty: the embedded one", func(c *Config) any { return &c.NATS.URL }},
	{"nats.token", "env:NAME or file:PATH (0600) of the NATS token of services and workers; with no credentials: the mesh token and the workers' own, for the embedded server", func(c *Config) any { return &c.NATS.Token }},
	{"nats.user", "NATS user, with a password", func(c *Config) any { return &c.NATS.User }},
	{"nats.password", "env:NAME or file:PATH (0600) of the NATS user's password", func(c *Config) any { return &c.NATS.Password }},
	{"nats.nkey", "env:NAME or file:PATH (0600) of the NKEY seed, SU..; the server knows the public key", func(c *Config) any { return &c.NATS.NKey }},
	{"nats.ca_file", "PEM authority of the NATS servers' certificates; empty: the system's", func(c *Config) any { return &c.NATS.CAFile }},
	{"nats.cert_file", "PEM certificate that this process shows to NATS", func(c *Config) any { return &c.NATS.CertFile }},
	{"nats.key_file", "PEM key of that certificate", func(c *Config) any { return &c.NATS.KeyFile }},
	{"nats.replicas", "copies of each stream; 0: three in a cluster, as far as it has nodes, else one", func(c *Config) any { return &c.NATS.Replicas }},
	{"nats.listen", "address of the embedded NATS server", func(c *Config) any { return &c.NATS.Listen }},
	{"nats.sync", "embedded NATS: fsync each stored message; runs need it not, their ledger is what is durable", func(c *Config) any { return &c.NATS.Sync }},
	{"consul.address", "Consul agent, host:port or https://host:port; empty: the embedded registry", func(c *Config) any { return &c.Consul.Address }},
	{"consul.ca_file", "PEM authority of the Consul agent's certificate; empty: the system's", func(c *Config) any { return &c.Consul.CAFile }},
	{"consul.cert_file", "PEM certificate that this process shows to the Consul agent", func(c *Config) any { return &c.Consul.CertFile }},
	{"consul.key_file", "PEM key of that certificate", func(c *Config) any { return &c.Consul.KeyFile }},
	{"consul.token", "env:NAME or file:PATH (0600) of the Consul ACL token of services and workers; empty: none for Consul, the mesh token and the workers' own for the embedded registry", func(c *Config) any { return &c.Consul.Token }},
	{"consul.listen", "address of the embedded registry", func(c *Config) any { return &c.Consul.Listen }},
	{"blob.url", "bucket of artifacts and payloads, s3://bucket/prefix or gs://bucket/prefix; empty: files in the state folder", func(c *Config) any { return &c.Blob.URL }},
	{"blob.endpoint", "URL of an object store that is not the cloud's own", func(c *Config) any { return &c.Blob.Endpoint }},
	{"blob.region", "region of an S3 bucket; empty: us-east-1", func(c *Config) any { return &c.Blob.Region }},
	{"blob.access_key", "id of an S3 access key; empty: what the cloud's own chain finds (environment, profile, role)", func(c *Config) any { return &c.Blob.AccessKey }},
	{"blob.secret_key", "env:NAME or file:PATH (0600) of the S3 secret key", func(c *Config) any { return &c.Blob.SecretKey }},
	{"blob.credentials", "env:NAME or file:PATH (0600) of a GCS service account's key (JSON); empty: Google's default credentials", func(c *Config) any { return &c.Blob.Credentials }},
	{"buffer.segment_bytes", "size at which a segment of samples is followed by the next; 0: 64 MiB. A snapshot frees whole segments", func(c *Config) any { return &c.Buffer.SegmentBytes }},
	{"buffer.durability", "what acknowledged samples and committed steps survive: fsync, a power cut; process, a kill of every process, at less waiting for the disk", func(c *Config) any { return &c.Buffer.Durability }},
	{"retention.succeeded_days", "days after which a run that succeeded is deleted with everything that is stored of it; 0: never", func(c *Config) any { return &c.Retention.SucceededDays }},
	{"retention.failed_days", "days after which a run that failed is deleted; 0: never", func(c *Config) any { return &c.Retention.FailedDays }},
	{"retention.cancelled_days", "days after which a run that was cancelled is deleted; 0: never", func(c *Config) any { return &c.Retention.CancelledDays }},
	{"retention.events_days", "days after which events are deleted, of runs and of services; 0: never. Metrics by step stay with their run", func(c *Config) any { return &c.Retention.EventsDays }},
	{"retention.ended_runs", "newest runs that succeeded, failed, or were cancelled which are kept; older ones are deleted within seconds; 0: all", func(c *Config) any { return &c.Retention.EndedRuns }},
	{"retention.telemetry_recent_minutes", "minutes for which the reports of workers are kept for each second", func(c *Config) any { return &c.Retention.TelemetryRecentMinutes }},
	{"retention.telemetry_fine_hours", "hours for which they are kept for each ten seconds; afterwards for each five minutes, as long as their run", func(c *Config) any { return &c.Retention.TelemetryFineHours }},
	{"database.url", "PostgreSQL for the state of every service: postgres://user@host:5432/name without a password, or env:NAME or file:PATH (0600) of an URL with it; empty: SQLite files in the state folder", func(c *Config) any { return &c.Database.URL }},
	{"database.schema_prefix", "each service has the schema and the role PREFIX_SERVICE; one prefix a mesh", func(c *Config) any { return &c.Database.SchemaPrefix }},
	{"database.max_connections", "most PostgreSQL connections of one service of this process", func(c *Config) any { return &c.Database.MaxConnections }},
	{"database.statement_timeout_s", "seconds after which PostgreSQL cancels a statement", func(c *Config) any { return &c.Database.StatementTimeout }},
	{"tls.cert_file", "PEM certificate of the gRPC listener", func(c *Config) any { return &c.TLS.CertFile }},
	{"tls.key_file", "PEM key of the gRPC listener", func(c *Config) any { return &c.TLS.KeyFile }},
	{"tls.ca_file", "PEM authority of the mesh; with it TLS is mutual, for services, workers and the embedded servers; empty: clients show none and the system's authorities are trusted", func(c *Config) any { return &c.TLS.CAFile }},
	{"tls.worker_cert_file", "PEM certificate that workers show; empty: that of this process", func(c *Config) any { return &c.TLS.WorkerCertFile }},
	{"tls.worker_key_file", "PEM key of that certificate", func(c *Config) any { return &c.TLS.WorkerKeyFile }},
	{"log.format", "text or json", func(c *Config) any { return &c.Log.Format }},
	{"log.level", "debug, info, warn or error", func(c *Config) any { return &c.Log.Level }},
	{"worker.command", "command that starts a worker, inference or learner is appended; empty: rollout-worker in the folder of rolloutd or on PATH", func(c *Config) any { return &c.Worker.Command }},
	{"worker.python", "Python interpreter of the planner's dry calls; empty: the one in the folder of the worker command", func(c *Config) any { return &c.Worker.Python }},
	{"worker.cores", "CPU cores that runs may use; 0: all", func(c *Config) any { return &c.Worker.Cores }},
	{"worker.env", "variables of this process that rewards need, as a comma list of names: credentials of clouds and databases are kept from workers otherwise", func(c *Config) any { return &c.Worker.Env }},
	{"worker.resume_on_start", "resume runs that were active when the scheduler last stopped", func(c *Config) any { return &c.Worker.ResumeOnStart }},
	{"worker.log_bytes", "size in bytes at which the log of a worker is rotated; one older file stays", func(c *Config) any { return &c.Worker.LogBytes }},
	{"worker.log_lines_per_second", "lines that a worker may log in a second, and a tenth of it if they differ only in digits; others are dropped and counted, except the last ones before an exit", func(c *Config) any { return &c.Worker.LogRate }},
}, launchKeys()...)

// launchKeys are those of [launch] and of its table for each kind of worker.
func launchKeys() []key {
	out := []key{
		{"launch.kind", "who starts the workers: local, the scheduler on its own host; external, an operator with rollout-worker KIND --join ADDRESS; slurm, a Slurm cluster", func(c *Config) any { return &c.Launch.Kind }},
		{"launch.partition", "Slurm partition of the workers; empty: the default one", func(c *Config) any { return &c.Launch.Partition }},
		{"launch.account", "Slurm account that the jobs of workers are charged to", func(c *Config) any { return &c.Launch.Account }},
		{"launch.time_limit", "time limit of the jobs of workers, as for sbatch --time; empty: that of the partition", func(c *Config) any { return &c.Launch.TimeLimit }},
		{"launch.options", "more options of sbatch, separated by spaces", func(c *Config) any { return &c.Launch.Options }},
	}
	for _, each := range []struct {
		worker string
		group  func(*Launch) *LaunchGroup
	}{
		{"learner", func(l *Launch) *LaunchGroup { return &l.Learner }},
		{"inference", func(l *Launch) *LaunchGroup { return &l.Inference }},
		{"reward", func(l *Launch) *LaunchGroup { return &l.Reward }},
		{"environment", func(l *Launch) *LaunchGroup { return &l.Environment }},
	} {
		add := func(name, usage string, field func(*LaunchGroup) any) {
			out = append(out, key{"launch." + each.worker + "." + name, usage, func(c *Config) any { return field(each.group(&c.Launch)) }})
		}
		add("kind", "the same for "+each.worker+" workers alone; empty: launch.kind", func(g *LaunchGroup) any { return &g.Kind })
		add("partition", "Slurm partition of "+each.worker+" workers; empty: launch.partition", func(g *LaunchGroup) any { return &g.Partition })
		add("account", "Slurm account of "+each.worker+" workers; empty: launch.account", func(g *LaunchGroup) any { return &g.Account })
		add("time_limit", "time limit of the job of one of the "+each.worker+" workers; empty: launch.time_limit", func(g *LaunchGroup) any { return &g.TimeLimit })
		add("options", "more options of sbatch for "+each.worker+" workers; empty: launch.options", func(g *LaunchGroup) any { return &g.Options })
		add("cpus", "CPUs of one of the "+each.worker+" workers, as for sbatch --cpus-per-task; 0: as Slurm decides", func(g *LaunchGroup) any { return &g.CPUs })
		add("gpus", "GPUs of one of the "+each.worker+" workers, as for sbatch --gpus", func(g *LaunchGroup) any { return &g.GPUs })
		add("memory", "memory of one of the "+each.worker+" workers, as for sbatch --mem: 16G", func(g *LaunchGroup) any { return &g.Memory })
	}
	return out
}

const envPrefix = "ROLLOUTD_"

func (k key) flag() string { return strings.NewReplacer(".", "-", "_", "-").Replace(k.name) }

func (k key) env() string {
	return envPrefix + strings.ToUpper(strings.NewReplacer(".", "_").Replace(k.name))
}

// set parses a flag's or variable's text. Lists are split at commas, commands at spaces.
func (k key) set(c *Config, text string) error {
	switch p := k.field(c).(type) {
	case *string:
		*p = text
	case *Ref:
		return p.UnmarshalText([]byte(text))
	case *bool:
		v, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", text)
		}
		*p = v
	case *int:
		v, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("%q is not an integer", text)
		}
		*p = v
	case *time.Duration:
		v, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%q is not a duration; write 15s or 2m", text)
		}
		*p = v
	case *[]string:
		split := func(r rune) bool { return r == ',' || r == ' ' }
		if k.name == "worker.command" {
			split = func(r rune) bool { return r == ' ' }
		}
		*p = nil
		if fields := strings.FieldsFunc(text, split); len(fields) > 0 {
			*p = fields
		}
	}
	return nil
}

// get is the text that set would read.
func (k key) get(c *Config) string {
	switch p := k.field(c).(type) {
	case *[]string:
		if k.name == "worker.command" {
			return strings.Join(*p, " ")
		}
		return strings.Join(*p, ",")
	case *bool:
		return strconv.FormatBool(*p)
	case *time.Duration:
		return p.String()
	case *int:
		return strconv.Itoa(*p)
	case *string:
		return *p
	case *Ref:
		return p.String()
	}
	return ""
}
