package doctor

import (
	"bytes"
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	_ "github.com/rollout-rl/rollout/libs/sqldb" // the driver "pgx"
)

// state looks at the folder of this host.
func state(_ context.Context, p Patient, r *report) {
	dir := p.Config.StateDir
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) { // it may not be there yet
		if _, err := os.Stat(dir); err == nil {
			break
		}
	}
	f, err := os.CreateTemp(dir, ".doctor-*")
	if err != nil {
		r.fail("writable", err, "give rolloutd's user the folder, or name another one with state_dir")
		return
	}
	_ = f.Close()
	_ = os.Remove(f.Name())
	r.ok("writable", p.Config.StateDir)
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		r.fail("disk", err, "")
		return
	}
	free := fs.Bavail * uint64(fs.Bsize)
	if free < diskLeast {
		r.warn("disk", output.Bytes(free)+" free", "free some space, or name a larger disk with state_dir")
		return
	}
	r.ok("disk", "enough is free")
}

// database looks at PostgreSQL as the user of the URL.
func database(ctx context.Context, p Patient, r *report) {
	url, err := p.Config.Database.Postgres(p.Environ)
	if err != nil {
		r.fail("configuration", err, "")
		return
	}
	if url == "" {
		r.skip("reach", "SQLite files in the state folder")
		return
	}
	db, err := sql.Open("pgx", url)
	if err != nil {
		r.fail("reach", errors.New("the URL can't be read"), "write postgres://user@host:5432/name")
		return
	}
	defer db.Close()
	began := p.Now()
	var version int
	var theirs time.Time
	var create, roles bool
	err = db.QueryRowContext(ctx, `SELECT current_setting('server_version_num')::int, clock_timestamp(),
		has_database_privilege(current_database(), 'CREATE'), (SELECT rolcreaterole OR rolsuper FROM pg_roles WHERE rolname = current_user)`).
		Scan(&version, &theirs, &create, &roles)
	if err != nil {
		r.fail("reach", err, "is the server up, the host right, and does pg_hba.conf let this user in?")
		return
	}
	between := p.Now().Sub(began)
	r.ok("reach", "")
	if version < 140000 {
		r.fail("version", fmt.Errorf("PostgreSQL %d", version/10000), "use PostgreSQL 14 or newer")
	} else {
		r.ok("version", "PostgreSQL "+strconv.Itoa(version/10000))
	}
	if create && roles {
		r.ok("permissions", "may make schemas and roles")
	} else {
		r.warn("permissions", "the user may not make schemas and roles", "GRANT CREATE ON DATABASE and ALTER ROLE .. CREATEROLE, or make the schemas and roles before; rolloutd names the statements that are missing")
	}
	r.skew(theirs, began, between)
}

// token is the mesh token, "" where there is none yet.
func token(p Patient) (string, error) {
	file := p.Config.TokenFile
	if file == "" {
		file = filepath.Join(p.Config.StateDir, "token")
	}
	text, err := rpc.ReadToken(file)
	if errors.Is(err, os.ErrNotExist) && p.Config.TokenFile == "" {
		return "", nil
	}
	return text, err
}

// nats looks at JetStream and at the streams that are there.
func nats(ctx context.Context, p Patient, r *report) {
	if p.Config.NATS.URL == "" {
		r.skip("reach", "the embedded server")
		return
	}
	mesh, err := token(p)
	if err != nil {
		r.fail("configuration", err, "")
		return
	}
	o, err := backend.NATS(p.Config.NATS, mesh, p.Environ)
	if err != nil {
		r.fail("configuration", err, "")
		return
	}
	o.URL = p.Config.NATS.URL
	connecting, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	b, err := bus.Connect(connecting, o)
	if err != nil {
		r.fail("reach", err, mendOf(err, map[error]string{
			bus.ErrToken: "check nats.token, nats.user with its password, or nats.nkey against the server's users",
			bus.ErrTLS:   "check nats.ca_file, and nats.cert_file where the server asks for certificates; tls:// in nats.url asks for TLS",
		}, "is the server up, and the host and port of nats.url right?"))
		return
	}
	defer b.Close()
	r.ok("reach", "")
	least(r, "NATS", b.Conn().ConnectedServerVersion(), 2, 10)
	info, err := b.JetStream().AccountInfo(ctx)
	if err != nil {
		r.fail("jetstream", err, "turn JetStream on in the server's configuration: jetstream { store_dir: .. }, and allow the user $JS.API.>")
		return
	}
	r.ok("jetstream", "on")
	if max := info.Limits.MaxStore; max > 0 && uint64(max) < info.Store+diskLeast {
		r.warn("storage", output.Bytes(uint64(max)-info.Store)+" left of the account's limit", "raise max_file of the servers or the account's storage")
	} else {
		r.ok("storage", "enough is left")
	}
	if err := b.Try(ctx); err != nil {
		mend := rpcerr.Mend(err)
		if mend == "" {
			mend = "allow the user $JS.API.> and rollout.>"
		}
		r.fail("write", err, mend)
	} else {
		r.ok("write", "makes a stream, stores a message and removes both")
	}
	if got := b.Conn().MaxPayload(); got < bus.MaxPayload {
		r.fail("max_payload", fmt.Errorf("it is %s", output.Bytes(uint64(got))), fmt.Sprintf("set max_payload: %dMB on the servers", bus.MaxPayload>>20))
	} else {
		r.ok("max_payload", output.Bytes(uint64(got)))
	}
	streams(ctx, b, p, r)
}

// streams compares the settings of the streams that are there with what they are made with, and the clock.
func streams(ctx context.Context, b *bus.Bus, p Patient, r *report) {
	wanted, wrong, seen := b.Replicas(), []string{}, 0
	began := p.Now()
	var theirs time.Time
	list := b.JetStream().ListStreams(ctx)
	for info := range list.Info() {
		theirs = info.TimeStamp
		if !ours(info) {
			continue
		}
		seen++
		if info.Config.Replicas != wanted {
			wrong = append(wrong, fmt.Sprintf("%s has %d", info.Config.Name, info.Config.Replicas))
		}
	}
	if err := list.Err(); err != nil {
		r.fail("streams", err, "allow the user $JS.API.>")
		return
	}
	if len(wrong) > 0 {
		r.warn("streams", fmt.Sprintf("not %d replicas: %s", wanted, strings.Join(wrong, ", ")), "start rolloutd, which brings the streams to their settings, or set nats.replicas")
	} else {
		r.ok("streams", fmt.Sprintf("%d there, %d replicas each", seen, wanted))
	}
	if !theirs.IsZero() {
		r.skew(theirs, began, p.Now().Sub(began))
	}
}

func ours(info *jetstream.StreamInfo) bool {
	name := info.Config.Name
	return name == bus.EventStream || strings.HasPrefix(name, bus.WorkStream("")) || strings.HasPrefix(name, bus.TrajStream(""))
}

// consul registers a service and takes it away again.
func consul(ctx context.Context, p Patient, r *report) {
	c := p.Config.Consul
	if c.Address == "" {
		r.skip("reach", "the embedded registry")
		return
	}
	acl, err := c.Token.Read("consul.token", p.Environ)
	if err != nil {
		r.fail("configuration", err, "")
		return
	}
	t, err := backend.TLS("consul", c.CAFile, c.CertFile, c.KeyFile, nil)
	if err != nil {
		r.fail("configuration", err, "")
		return
	}
	client, err := discovery.NewClient(discovery.Options{Address: c.Address, Token: acl, TLS: t})
	if err != nil {
		r.fail("configuration", err, "write consul.address as host:8500 or https://host:8501")
		return
	}
	version, leader, err := client.Describe(ctx)
	if err != nil {
		r.fail("reach", err, mendOf(err, map[error]string{discovery.ErrDenied: "give the token of consul.token agent:read and node:read"},
			"is the agent up, and the host and port of consul.address right? An agent at https needs https:// there"))
		return
	}
	r.ok("reach", "")
	least(r, "Consul", version, 1, 10)
	if leader == "" {
		r.fail("leader", errors.New("the cluster has none"), "see `consul operator raft list-peers`; a majority of the servers must be up")
		return
	}
	r.ok("leader", "there is one")
	registering, cancel := context.WithCancel(ctx)
	name := "rollout-doctor"
	reg, err := client.Register(registering, discovery.Service{Name: name, ID: name + "-" + rand.Text(), Address: "127.0.0.1", Port: 1})
	cancel()
	if err != nil {
		r.fail("permissions", err, `give the token: service_prefix "" { policy = "write" }, node_prefix "" { policy = "read" }`)
		return
	}
	reg.Wait()
	r.ok("permissions", "registers and deregisters")
}

// blobs writes an object twice, reads, lists and deletes it.
func blobs(ctx context.Context, p Patient, r *report) {
	store, err := backend.Bucket(ctx, p.Config.Blob, p.Environ)
	if err != nil {
		r.fail("reach", err, mendOf(err, map[error]string{
			blob.ErrNoBucket: "make the bucket, or mend blob.url and blob.region",
			blob.ErrDenied:   "check blob.access_key with its secret, or the role of this host; it needs to list, read, create and delete objects",
		}, "is blob.endpoint right, and can this host reach it?"))
		return
	}
	if store == nil {
		r.skip("reach", "files in the state folder")
		return
	}
	r.ok("reach", "")
	key, data := "doctor/"+strings.ToLower(rand.Text()), []byte("rollout doctor")
	began := p.Now()
	info, err := store.Put(ctx, key, bytes.NewReader(data))
	if err != nil {
		r.fail("write", err, "allow creating objects")
		return
	}
	between := p.Now().Sub(began)
	r.ok("write", "")
	if _, err := store.Put(ctx, key, bytes.NewReader(data)); !errors.Is(err, blob.ErrExists) {
		r.fail("create once", errors.Join(errors.New("a second write of a key was not refused"), err), "the object store must honour If-None-Match: *; use another or a newer one")
	} else {
		r.ok("create once", "a second write is refused")
	}
	if got, err := readAll(ctx, store, key); err != nil || !bytes.Equal(got, data) {
		r.fail("read", fmt.Errorf("%d bytes of %d came back: %w", len(got), len(data), err), "allow reading objects")
	} else {
		r.ok("read", "")
	}
	if err := store.Delete(ctx, key); err != nil {
		r.fail("delete", err, "allow deleting objects: payloads are trimmed")
	} else {
		r.ok("delete", "")
	}
	r.skew(info.Modified, began, between+time.Second) // object stores tell whole seconds
}

func readAll(ctx context.Context, store blob.Store, key string) ([]byte, error) {
	body, err := store.Get(ctx, key, blob.Range{})
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}

// certificates looks at ours: that they are in force and for how long, lead to their authority, and that nobody else reads their keys.
func certificates(_ context.Context, p Patient, r *report) {
	t, n, c := p.Config.TLS, p.Config.NATS, p.Config.Consul
	seen := false
	for _, one := range []struct {
		key   string
		files cert.Files
	}{
		{"tls.cert_file", cert.Files{Cert: t.CertFile, Key: t.KeyFile, CA: t.CAFile}},
		{"tls.worker_cert_file", cert.Files{Cert: t.WorkerCertFile, Key: t.WorkerKeyFile, CA: t.CAFile}},
		{"nats.cert_file", cert.Files{Cert: n.CertFile, Key: n.KeyFile}}, // the servers' authority need not be that of ours
		{"consul.cert_file", cert.Files{Cert: c.CertFile, Key: c.KeyFile}},
	} {
		if one.files.Cert == "" {
			continue
		}
		seen = true
		leaf, err := cert.Check(one.files, p.Now())
		switch {
		case err != nil:
			r.fail(one.key, err, rpcerr.Mend(err))
		case p.Now().Add(7 * 24 * time.Hour).After(leaf.NotAfter):
			r.warn(one.key, "it ends at "+leaf.NotAfter.UTC().Format(time.RFC3339), "renew it: `rollout certs renew`, each day by a timer")
		default:
			r.ok(one.key, "good until "+leaf.NotAfter.UTC().Format(time.RFC3339))
		}
	}
	if !seen {
		r.skip("certificates", "none are configured")
	}
}

// least judges a version "MAJOR.MINOR..".
func least(r *report, product, version string, major, minor int) {
	var gotMajor, gotMinor int
	if _, err := fmt.Sscanf(version, "%d.%d", &gotMajor, &gotMinor); err != nil {
		r.warn("version", "it tells none", "")
		return
	}
	if gotMajor < major || gotMajor == major && gotMinor < minor {
		r.fail("version", fmt.Errorf("%s %s", product, version), fmt.Sprintf("use %s %d.%d or newer", product, major, minor))
		return
	}
	r.ok("version", product+" "+version)
}

func mendOf(err error, known map[error]string, otherwise string) string {
	for target, mend := range known {
		if errors.Is(err, target) {
			return mend
		}
	}
	return otherwise
}
