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

// local checks the files and addresses of an embedded control plane without changing them.
func local(ctx context.Context, p Input, r *report) {
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
				r.warn(filepath.Base(path), "it is too large to be checked here", "check it with `sqlite3 "+path+" 'PRAGMA quick_check'`")
			default:
				r.fail(filepath.Base(path), err, rpcerr.Fix(err))
			}
		}
	}
	ports(ctx, p, r)
}

// wholeFile reads every page of a database.
func wholeFile(ctx context.Context, path string) error {
	db, err := sqldb.OpenReadOnly(path)
	if err != nil {
		if info, e := os.Stat(path + "-wal"); e == nil && info.Size() > 0 && !errors.Is(err, os.ErrPermission) {
			return nil // rolloutd, which can write, checks it
		}
		return err
	}
	defer db.Close()
	return db.Whole(ctx)
}

// ports checks that the addresses are free, or used by the rolloutd of this state folder.
func ports(ctx context.Context, p Input, r *report) {
	c := p.Config
	if info, err := daemon.Find(c.StateDir); err == nil && info != nil {
		r.skip("ports", "in use by the running rolloutd")
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
		fix := "set " + one.key + " to an address of this host"
		if errors.Is(err, syscall.EADDRINUSE) {
			fix = "stop the process that uses the port, or set " + one.key + " to another address; port 0 selects a free port"
		}
		r.fail(one.key, err, fix)
	}
}
