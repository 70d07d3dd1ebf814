//go:build servers

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nkeys"

	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/servertest"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
)

const consulToken = "6f3c1d6e-0f53-4a86-9c0f-6d1f6a0c7a12"

// production is a configuration with external servers, and its secrets.
type production struct {
	file    string
	root    string
	s3      *servertest.S3
	consul  *servertest.Consul
	secrets []string
}

func startProduction(t *testing.T) *production {
	t.Helper()
	p := &production{root: t.TempDir()}
	secret := func(name, text string) string {
		path := filepath.Join(p.root, name)
		if err := os.WriteFile(path, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		p.secrets = append(p.secrets, text)
		return path
	}
	pair, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	seed, _ := pair.Seed()
	public, _ := pair.PublicKey()
	ca := servertest.NewCA(t)
	cert, key := ca.Issue(t, "nats")
	clientCert, clientKey := ca.Issue(t, "rolloutd")
	nats := servertest.StartNATS(t, servertest.NATSOptions{NKey: public, Cert: cert, Key: key, ClientCA: ca.File, Nodes: 3})
	p.consul = servertest.StartConsul(t, servertest.ConsulOptions{Token: consulToken})
	p.s3 = servertest.StartS3(t)
	if err := os.Mkdir(filepath.Join(p.s3.Dir, "rollout"), 0o700); err != nil { // a bucket
		t.Fatal(err)
	}
	place := sqldbtest.Place(t)
	p.file = filepath.Join(p.root, "rolloutd.toml")
	text := fmt.Sprintf(`
token_file = %q
shared_dir = %q
[nats]
url = %q
nkey = %q
ca_file = %q
cert_file = %q
key_file = %q
[consul]
address = %q
token = %q
[blob]
url = "s3://rollout/mesh"
endpoint = %q
access_key = %q
secret_key = %q
[database]
url = %q
schema_prefix = %q
`, secret("token", strings.Repeat("5ec2e7", 10)), filepath.Join(p.root, "shared"), nats.URL(), "file:"+secret("nkey", string(seed)), ca.File, clientCert, clientKey,
		p.consul.Address, "file:"+secret("consul-token", consulToken), p.s3.Endpoint, p.s3.AccessKey, "file:"+secret("s3-secret", p.s3.SecretKey), place.URL, place.Prefix)
	if err := os.WriteFile(p.file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// Seven processes on PostgreSQL, Consul with access control, a NATS cluster with NKEYs and mutual
// TLS, and S3.
func TestProductionShape(t *testing.T) {
	t.Parallel()
	p := startProduction(t)
	s := shape{}
	for _, name := range serviceNames(targets) {
		s[name] = spawn(t, filepath.Join(p.root, name), "--target", name, "--config", p.file)
	}
	for _, d := range s {
		d.runtime()
	}
	client, err := discovery.NewClient(discovery.Options{Address: p.consul.Address, Token: consulToken})
	if err != nil {
		t.Fatal(err)
	}
	for name, d := range s {
		var list []discovery.Instance
		for list = range client.Watch(deadline(t), name) { // a leader registers once it leads
			if len(list) == 1 && list[0].Address == d.runtime().GRPC {
				break
			}
		}
		if len(list) != 1 {
			t.Errorf("%s in Consul: %+v", name, list)
		}
	}
	schedulerAsksThePlanner(t, s)
	snapshotReachesStorageByBothRoads(t, s)
	gatewayAnswers(t, s)
	entries, err := filepath.Glob(filepath.Join(p.s3.Dir, "rollout", "mesh", "cas", "*", "*"))
	if err != nil || len(entries) == 0 {
		t.Errorf("artifacts in the bucket: %v %v", entries, err)
	}

	// The agent is killed and restarted without state, and a service moves. Calls must find it again.
	p.consul.Kill()
	schedulerAsksThePlanner(t, s)
	p.consul.Start()
	planner := s["planner"]
	planner.kill()
	s["planner"] = start(t, planner.state, planner.cmd.Args[3:]...)
	schedulerAsksThePlanner(t, s)
	snapshotReachesStorageByBothRoads(t, s)
	for name, d := range s {
		for _, secret := range p.secrets {
			if strings.Contains(d.log.String(), secret) {
				t.Errorf("the log of %s contains a secret", name)
			}
		}
	}
	nothingTells(t, p)
}

// nothingTells searches every file for secrets, except the files that must contain them.
func nothingTells(t *testing.T, p *production) {
	t.Helper()
	holders := []string{"token", "nkey", "consul-token", "s3-secret"}
	err := filepath.WalkDir(p.root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !d.Type().IsRegular() || slices.Contains(holders, filepath.Base(path)) {
			return nil // the file was removed in the meantime
		}
		data, err := os.ReadFile(path)
		for _, secret := range p.secrets {
			if err == nil && strings.Contains(string(data), secret) {
				t.Errorf("%s contains a secret", path)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// Wrong credentials are reported at the start with the key to fix and without the secret.
func TestProductionRefusals(t *testing.T) {
	t.Parallel()
	p := startProduction(t)
	wrong := filepath.Join(p.root, "wrong")
	if err := os.WriteFile(wrong, []byte("wrong-secret-0123\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	start(t, filepath.Join(p.root, "first"), "--target", "planner", "--config", p.file)
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"mesh":   {[]string{"--token-file", wrong}, "belongs to another control plane"},
		"consul": {[]string{"--consul-token", "file:" + wrong}, "refused the token"},
		"bucket": {[]string{"--blob-url", "s3://missing"}, "blob.url"},
		"blobs":  {[]string{"--blob-secret-key", "file:" + wrong}, "refused the credentials"},
		"nats":   {[]string{"--nats-nkey", "file:" + wrong}, "NKEY seed"},
	} {
		d := spawn(t, filepath.Join(p.root, name), append([]string{"--target", "storage", "--config", p.file}, c.args...)...)
		if code := d.wait(); code == 0 || !strings.Contains(d.log.String(), c.says) || strings.Contains(d.log.String(), "wrong-secret") {
			t.Errorf("%s: exit code %d\n%s", name, code, d.log)
		}
	}
}
