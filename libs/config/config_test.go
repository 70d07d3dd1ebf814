package config

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var home = []string{"HOME=/home/u"}

func load(t *testing.T, env []string, args ...string) Config {
	t.Helper()
	c, err := Load(args, append(env, home...), &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "rolloutd.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func withShared(c Config) Config { c.SharedDir = c.StateDir; return c }

func TestDefaults(t *testing.T) {
	t.Parallel()
	if got, want := load(t, nil), withShared(Default("/home/u/.local/state/rollout")); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v", got)
	}
	if got := load(t, []string{"XDG_STATE_HOME=/x"}).StateDir; got != "/x/rollout" {
		t.Error(got)
	}
	if got := load(t, []string{"ROLLOUT_STATE_DIR=/y", "XDG_STATE_HOME=/x"}); got.StateDir != "/y" {
		t.Error(got.StateDir)
	}
	if _, err := Load(nil, nil, &bytes.Buffer{}); err == nil {
		t.Error("a state folder out of nothing")
	}
}

func TestPathsOfAFile(t *testing.T) {
	t.Parallel()
	path := write(t, `
state_dir = "~/state"
token_file = "/a/token"
[tls]
cert_file = "certs/c.pem"
key_file = "../k.pem"
[nats]
token = "file:nats-token"
[database]
url = "file:~/url"
`)
	folder := filepath.Dir(path)
	got := load(t, nil, "--config", path)
	for _, c := range [][2]string{
		{got.StateDir, "/home/u/state"}, {got.TokenFile, "/a/token"},
		{got.TLS.CertFile, filepath.Join(folder, "certs/c.pem")}, {got.TLS.KeyFile, filepath.Join(filepath.Dir(folder), "k.pem")},
		{got.NATS.Token.String(), "file:" + filepath.Join(folder, "nats-token")}, {got.Database.URL, "file:/home/u/url"},
	} {
		if c[0] != c[1] {
			t.Errorf("%q, want %q", c[0], c[1])
		}
	}
}

// The CLI finds the folder only with StateDir.
func TestTheStateFolderOfTheDefaultFile(t *testing.T) {
	t.Parallel()
	home := t.TempDir()
	if err := os.MkdirAll(filepath.Join(home, "rollout"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, "rollout", "rolloutd.toml"), []byte("state_dir = \"/file\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, env := range map[string][]string{
		"/file":     {"XDG_CONFIG_HOME=" + home, "XDG_STATE_HOME=/x"},
		"/variable": {"XDG_CONFIG_HOME=" + home, "ROLLOUT_STATE_DIR=/variable"},
	} {
		found, err := StateDir(env)
		if got := load(t, env).StateDir; err != nil || got != want || found != want {
			t.Errorf("rolloutd has %q, the CLI %q %v, want %q", got, found, err, want)
		}
	}
}

func TestASegmentHasNoNegativeSize(t *testing.T) {
	t.Parallel()
	if _, err := Load([]string{"--buffer-segment-bytes=-1"}, home, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "buffer.segment_bytes") {
		t.Errorf("got %v", err)
	}
}

func TestSourcesGoOverEachOther(t *testing.T) {
	t.Parallel()
	path := write(t, `
target = ["buffer", "snapshot"]
drain = "7s"
[nats]
url = "nats://file:4222"
sync = true
[log]
level = "debug"
format = "json"
`)
	env := []string{"ROLLOUTD_NATS_URL=nats://env:4222", "ROLLOUTD_LOG_LEVEL=warn", "ROLLOUTD_WORKER_COMMAND=python -m rollout_workers"}
	c := load(t, env, "--config", path, "--log-level", "error", "--listen=127.0.0.1:7000")
	want := withShared(Default("/home/u/.local/state/rollout"))
	want.Target = []string{"buffer", "snapshot"}
	want.Drain = 7 * time.Second
	want.NATS.URL, want.NATS.Sync = "nats://env:4222", true
	want.Log = Log{Format: "json", Level: "error"}
	want.Listen = "127.0.0.1:7000"
	want.Worker.Command = []string{"python", "-m", "rollout_workers"}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
	if got := load(t, nil, "--nats-sync", "--target", "nats,registry"); !got.NATS.Sync || !slices.Equal(got.Target, []string{"nats", "registry"}) {
		t.Errorf("flags: %+v", got)
	}
}

// The launcher of a kind of worker is its own, or that of all kinds.
func TestLaunchers(t *testing.T) {
	t.Parallel()
	path := write(t, `
[launch]
kind = "external"
[launch.learner]
kind = "local"
`)
	got := load(t, nil, "--config", path).Launch.Groups()
	for worker, want := range map[string]string{"learner": LaunchLocal, "inference": LaunchExternal, "reward": LaunchExternal, "environment": LaunchExternal} {
		if got[worker].Kind != want {
			t.Errorf("%s workers are %s, want %s", worker, got[worker].Kind, want)
		}
	}
	for _, flag := range []string{"--launch-kind=ssh", "--launch-reward-kind=ssh"} {
		key := strings.NewReplacer("--", "", "-", ".").Replace(strings.TrimSuffix(flag, "=ssh"))
		if _, err := Load([]string{flag}, home, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), key+`: "ssh" is not one of local, external, slurm`) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

// Resources are those of all kinds of workers, unless a kind has its own.
func TestResourcesOfSlurm(t *testing.T) {
	t.Parallel()
	path := write(t, `
[launch]
kind = "slurm"
partition = "cpu"
time_limit = "1-0"
[launch.learner]
partition = "gpu"
gpus = 8
cpus = 16
memory = "64G"
options = "--exclusive --qos=high"
`)
	got := load(t, nil, "--config", path).Launch.Groups()
	want := LaunchGroup{Kind: LaunchSlurm, Partition: "gpu", TimeLimit: "1-0", GPUs: 8, CPUs: 16, Memory: "64G", Options: "--exclusive --qos=high"}
	if got["learner"] != want {
		t.Errorf("got %+v, want %+v", got["learner"], want)
	}
	if want := (LaunchGroup{Kind: LaunchSlurm, Partition: "cpu", TimeLimit: "1-0"}); got["inference"] != want {
		t.Errorf("got %+v, want %+v", got["inference"], want)
	}
	for text, want := range map[string]string{
		"[launch]\npartition = \"cpu\"":                                      `launch: partition, account, time_limit, options, cpus, gpus, and memory are for kind = "slurm" alone`,
		"[launch.reward]\nkind = \"external\"\ngpus = 1":                     `launch.reward: partition, account,`,
		"[launch]\nkind = \"slurm\"\ntime_limit = \"a day\"":                 `launch.time_limit: "a day" is not a time limit of Slurm`,
		"[launch]\nkind = \"slurm\"\n[launch.reward]\nmemory = \"16 GB\"":    `launch.reward.memory: "16 GB" is not a size of Slurm; write 16G`,
		"[launch]\nkind = \"slurm\"\n[launch.learner]\ncpus = -1\ngpus = -2": "launch.learner.cpus: -1 is below 0\nlaunch.learner.gpus: -2 is below 0",
		"[launch]\nkind = \"slurm\"\noptions = \"-p gpu\"":                   `launch.options: "-p" does not begin with --`,
		"[launch]\nkind = \"slurm\"\noptions = \"--comment=x --qos=high --requeue\"": "launch.options: \"--comment=x\" changes what rolloutd relies on to follow its jobs (--comment); remove it\n" +
			`launch.options: "--requeue" changes what rolloutd relies on to follow its jobs (--requeue); remove it`,
		"[launch]\nkind = \"slurm\"\n[launch.learner]\noptions = \"--outp=x\"": `launch.learner.options: "--outp=x" changes what rolloutd relies on to follow its jobs (--output); remove it`,
	} {
		if _, err := Load([]string{"--config", write(t, text)}, home, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

// Every leaf of the struct has a key of its TOML name, so that a file, a variable and a flag can
// say the same.
func TestEveryFieldHasAKey(t *testing.T) {
	t.Parallel()
	var want, got []string
	var walk func(prefix string, typ reflect.Type)
	walk = func(prefix string, typ reflect.Type) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			name := prefix + f.Tag.Get("toml")
			if f.Type.Kind() == reflect.Struct && f.Type != reflect.TypeFor[Ref]() {
				walk(name+".", f.Type)
				continue
			}
			want = append(want, name)
		}
	}
	walk("", reflect.TypeFor[Config]())
	for _, k := range keys {
		got = append(got, k.name)
		c := Default("/s")
		if err := k.set(&c, k.get(&c)); err != nil || !reflect.DeepEqual(c, Default("/s")) {
			t.Errorf("%s does not read what it writes: %v", k.name, err)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("keys %v\nfields %v", got, want)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		file  string
		env   []string
		args  []string
		says  []string
		hides string
	}{
		"unknown keys, with their lines": {file: "listen = \"127.0.0.1:0\"\nlissten = 1\n[nats]\nurll = 2\n", says: []string{":2:1: unknown key \"lissten\"; did you mean `listen`?", ":4:1: unknown key \"nats.urll\"; did you mean `nats.url`?"}},
		"a key of a table":               {file: "[blob]\nfolder = \"x\"\n", says: []string{`unknown key "blob.folder"; there are blob.url, blob.endpoint`}, hides: "nats.url"},
		"wrong type":                     {file: "listen = 1\n", says: []string{":1:10:"}},
		"words for a number":             {file: "[nats]\nreplicas = \"3\"\n", says: []string{":2:12: nats.replicas: expected an integer, got a string; write `replicas = 1`"}, hides: "struct"},
		"a text for a list":              {file: "target = \"all\"\n", says: []string{":1:10: target: expected an array of strings, got a string; write `target = [\"..\"]`"}, hides: "[]string"},
		"a number in a list":             {file: "target = [1]\n", says: []string{"expected an array of strings, got an integer"}},
		"a duration in a number":         {file: "drain = 15\n", says: []string{":1:9: drain: expected a duration in a string, got an integer; write `drain = \"15s\"`"}},
		"a text for a switch":            {file: "[nats]\nsync = \"yes\"\n", says: []string{"nats.sync: expected a boolean, got a string; write `sync = true`"}},
		"a text for a table":             {file: "nats = \"x\"\n", says: []string{":1:8: nats: expected a table, got a string; write its keys below a line `[nats]`"}, hides: "NATS"},
		"a list of tables":               {file: "[[nats]]\nurl = \"x\"\n", says: []string{"nats: expected a table, got an array"}, hides: "struct"},
		"a number as secret":             {file: "[nats]\npassword = 70431\n", says: []string{"nats.password: expected a string that says where the secret is; write `password = \"file:PATH\"`"}, hides: "70431"},
		"broken TOML":                    {file: "listen = \n", says: []string{":1:"}},
		"bad duration in the file":       {file: "drain = \"soon\"\n", says: []string{"drain", "is not a duration"}},
		"unknown variable":               {env: []string{"ROLLOUTD_NATS=1"}, says: []string{"unknown variable ROLLOUTD_NATS; did you mean `ROLLOUTD_NATS_URL`?"}},
		"bad variable":                   {env: []string{"ROLLOUTD_DRAIN=x"}, says: []string{"ROLLOUTD_DRAIN", "is not a duration"}},
		"unknown flag":                   {args: []string{"--natsurl", "x"}, says: []string{"natsurl"}},
		"stray argument":                 {args: []string{"buffer"}, says: []string{`"buffer"`}},
		"missing file":                   {args: []string{"--config", "/none.toml"}, says: []string{"/none.toml"}},
		"plain text on a network":        {args: []string{"--listen", "0.0.0.0:7000"}, says: []string{"not loopback", "tls.cert_file"}},
		"a gateway for all":              {args: []string{"--gateway-listen", "0.0.0.0:80"}, says: []string{"gateway.listen: 0.0.0.0:80 is not loopback", "tls.cert_file"}},
		"servers without an authority":   {args: []string{"--nats-listen", "0.0.0.0:1", "--consul-listen", "0.0.0.0:2", "--tls-cert-file", "c", "--tls-key-file", "k"}, says: []string{"nats.listen", "consul.listen", "tls.ca_file", "insecure_listen"}},
		"a worker without the others":    {args: []string{"--tls-worker-cert-file", "c", "--tls-worker-key-file", "k"}, says: []string{"ca_file too"}},
		"joins itself":                   {args: []string{"--state-dir", "/s", "--join", "/s"}, says: []string{"its own"}},
		"half of TLS":                    {args: []string{"--tls-cert-file", "x"}, says: []string{"go together"}},
		"secret in an URL":               {args: []string{"--nats-url", "nats://tok@h:1"}, says: []string{"nats.token", "file:PATH"}},
		"a token in the file":            {file: "[nats]\ntoken = \"hunter2\"\n[blob]\nsecret_key = \"hunter2\"\n", says: []string{":2:9: nats.token: no secret stands in a configuration", "file:PATH", "env:NAME"}, hides: "hunter2"},
		"a token in a flag":              {args: []string{"--nats-token", "hunter2"}, says: []string{"file:PATH"}, hides: "hunter2"},
		"a token in a variable":          {env: []string{"ROLLOUTD_CONSUL_TOKEN=hunter2"}, says: []string{"ROLLOUTD_CONSUL_TOKEN", "file:PATH"}, hides: "hunter2"},
		"keys of before":                 {file: "[nats]\ntoken_file = \"/t\"\n[database]\nurl_env = \"X\"\n", says: []string{`nats.token_file is now nats.token = "file:PATH"`, `database.url = "env:NAME"`}},
		"a flag of before":               {args: []string{"--nats-token-file", "/t"}, says: []string{`nats.token = "file:PATH"`}},
		"a variable of before":           {env: []string{"ROLLOUTD_NATS_TOKEN_ENV=X"}, says: []string{`nats.token = "env:NAME"`}},
		"a variable without a name":      {args: []string{"--nats-token", "env:"}, says: []string{"name of a variable"}},
		"a password in a NATS URL":       {args: []string{"--nats-url", "nats://u:hunter2@h:1,nats://x:1"}, says: []string{"nats.password"}, hides: "hunter2"},
		"two kinds of NATS credentials":  {args: []string{"--nats-token", "file:a", "--nats-nkey", "file:b"}, says: []string{"nkey and token exclude"}},
		"a user without a password":      {args: []string{"--nats-user", "u"}, says: []string{"user and password go together"}},
		"half of TLS to NATS":            {args: []string{"--nats-cert-file", "x"}, says: []string{"nats: cert_file and key_file"}},
		"no bucket":                      {args: []string{"--blob-url", "https://x/y"}, says: []string{"s3://bucket/prefix"}},
		"a key in a bucket's URL":        {args: []string{"--blob-url", "s3://id:hunter2@bucket"}, says: []string{"blob.secret_key"}, hides: "hunter2"},
		"a key without its secret":       {args: []string{"--blob-access-key", "id"}, says: []string{"access_key and secret_key"}},
		"an object store in plain text":  {args: []string{"--blob-endpoint", "http://store.internal:9000"}, says: []string{"https"}},
		"a token in Consul's address":    {args: []string{"--consul-address", "http://x:hunter2@h:1"}, says: []string{"consul.token"}, hides: "hunter2"},
		"password in an URL":             {file: "[database]\nurl = \"postgres://u:hunter2@h/db\"\n", says: []string{"database.url", "file:PATH", "env:NAME"}, hides: "hunter2"},
		"password in a parameter":        {args: []string{"--database-url", "postgres://u@h/db?password=hunter2"}, says: []string{"database.url", "file:PATH"}, hides: "hunter2"},
		"password of words":              {args: []string{"--database-url", "host=h password=hunter2"}, says: []string{"postgres://"}, hides: "hunter2"},
		"a prefix that must be quoted":   {args: []string{"--database-schema-prefix", "Roll-Out"}, says: []string{"schema_prefix"}},
		"too few connections":            {args: []string{"--database-max-connections", "1"}, says: []string{"max_connections"}},
		"no variable's name":             {args: []string{"--worker-env", "A,B-C"}, says: []string{`worker.env: "B-C" is not a variable name`}},
		"a setting passed on":            {file: "[worker]\nenv = [\"ROLLOUTD_LISTEN\"]\n", says: []string{"worker.env: ROLLOUTD_LISTEN is reserved for rolloutd"}},
		"a secret passed on":             {args: []string{"--worker-env", "PW", "--nats-user", "u", "--nats-password", "env:PW"}, says: []string{"PW holds the secret of nats.password"}},
		"the database passed on":         {args: []string{"--worker-env", "URL", "--database-url", "env:URL"}, says: []string{"URL holds the secret of database.url"}},
		"all at once":                    {args: []string{"--log-format", "xml", "--log-level", "loud", "--nats-url", "h:1"}, says: []string{"xml", "loud", "h:1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := c.args
			if c.file != "" {
				args = append(args, "--config", write(t, c.file))
			}
			_, err := Load(args, append(c.env, home...), &bytes.Buffer{})
			if err == nil {
				t.Fatal("no error")
			}
			for _, s := range c.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%q is not in %q", s, err)
				}
			}
			if c.hides != "" && strings.Contains(err.Error(), c.hides) {
				t.Errorf("%q contains a secret", err)
			}
		})
	}
}

func TestPlainTextIsTyped(t *testing.T) {
	t.Parallel()
	open := []string{"--listen", "10.0.0.1:1", "--nats-listen", "0.0.0.0:1", "--consul-listen", "[::]:1", "--gateway-listen", "host.internal:1"}
	if _, err := Load(open, home, &bytes.Buffer{}); !errors.Is(err, ErrPlainText) || strings.Count(err.Error(), "would be plain text") != 4 {
		t.Error(err)
	}
	for _, fix := range [][]string{{"--insecure-listen"}, {"--tls-cert-file", "c", "--tls-key-file", "k", "--tls-ca-file", "a"}} {
		if _, err := Load(append(open, fix...), home, &bytes.Buffer{}); err != nil {
			t.Errorf("%v: %v", fix, err)
		}
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if _, err := Load([]string{"--help"}, home, &out); !errors.Is(err, flag.ErrHelp) {
		t.Fatal(err)
	}
	for _, s := range []string{"-nats-url", "ROLLOUTD_NATS_URL", "-config", "-state-dir"} {
		if !strings.Contains(out.String(), s) {
			t.Errorf("the help lacks %s", s)
		}
	}
}

func TestRuntimeFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "rolloutd.json")
	if _, err := ReadRuntime(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	want := Runtime{PID: 7, GRPC: "127.0.0.1:1", Gateway: "http://127.0.0.1:2", NATS: "nats://127.0.0.1:3", Consul: "127.0.0.1:4", TokenFile: "/t", Version: "v0", Targets: []string{"all"}}
	if err := WriteRuntime(path, want); err != nil {
		t.Fatal(err)
	}
	got, err := ReadRuntime(path)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v %v", got, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v %v", info.Mode(), err)
	}
}
