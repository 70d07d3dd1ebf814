package doctor

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/libs/rpc"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
)

// local looks at what an embedded control plane finds on this host, and makes nothing.
func local(ctx context.Context, p Patient, r *report) {
	file := p.Config.TokenFile
	if file == "" {
		file = filepath.Join(p.Config.StateDir, "token")
	}
	if _, err := rpc.ReadToken(file); err != nil && (p.Config.TokenFile != "" || !errors.Is(err, os.ErrNotExist)) {
		r.fail("token", err, rpcerr.Fix(err))
	} else {
		r.ok("token", "")
	}
	if p.Config.Database.URL == "" {
		files, _ := filepath.Glob(filepath.Join(p.Config.StateDir, "db", "*.sqlite"))
		for _, path := range files {
			switch err := wholeFile(ctx, path); {
			case err == nil:
				r.ok(filepath.Base(path), "")
			case ctx.Err() != nil:
				r.warn(filepath.Base(path), "it is too large to be read here", "`sqlite3 "+path+" 'PRAGMA quick_check'` reads it to its end")
			default:
				r.fail(filepath.Base(path), err, rpcerr.Fix(err))
			}
		}
	}
	ports(ctx, p, r)
}

// wholeFile reads every page of a file, which SQLite shall take for a whole database.
func wholeFile(ctx context.Context, path string) error {
	db, err := sqldb.OpenReadOnly(path)
	if err != nil {
		if info, e := os.Stat(path + "-wal"); e == nil && info.Size() > 0 && !errors.Is(err, os.ErrPermission) {
			return nil // rolloutd, which may write, reads it
		}
		return err
	}
	defer db.Close()
	return db.Whole(ctx)
}

// ports looks whether the addresses are free, or those of the rolloutd of this state folder.
func ports(ctx context.Context, p Patient, r *report) {
	c := p.Config
	if info, err := daemon.Find(c.StateDir); err == nil && info != nil {
		r.skip("ports", "rolloutd runs and has them")
		return
	}
	for _, one := range []struct {
		key, target, address string
		hosted               bool
	}{
		{"listen", "", c.Listen, true}, {"gateway.listen", "rollout-gateway", c.Gateway.Listen, true},
		{"nats.listen", "nats", c.NATS.Listen, c.NATS.URL == "" && c.Join == ""},
		{"consul.listen", "registry", c.Consul.Listen, c.Consul.Address == "" && c.Join == ""},
	} {
		named := one.target == "" || slices.Contains(c.Target, one.target)
		if !named && (!one.hosted || !slices.Contains(c.Target, "all")) {
			continue
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", one.address)
		if err == nil {
			l.Close()
			r.ok(one.key, one.address)
			continue
		}
		fix := "give " + one.key + " an address of this host"
		if errors.Is(err, syscall.EADDRINUSE) {
			fix = "stop what has the port, or give " + one.key + " another address; with port 0 it is a free one"
		}
		r.fail(one.key, err, fix)
	}
}
