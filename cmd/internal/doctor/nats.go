package doctor

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// nats checks JetStream and the existing streams.
func nats(ctx context.Context, p Input, r *report) {
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
		r.fail("reach", err, fixOf(err, map[error]string{
			bus.ErrToken: "check nats.token, nats.user with its password, or nats.nkey against the server's users",
			bus.ErrTLS:   "check nats.ca_file, and nats.cert_file if the server requires client certificates; tls:// in nats.url requires TLS",
		}, "check that the server is running, and nats.url"))
		return
	}
	defer b.Close()
	r.ok("reach", "")
	least(r, "NATS", b.Conn().ConnectedServerVersion(), 2, 10)
	info, err := b.JetStream().AccountInfo(ctx)
	if err != nil {
		r.fail("jetstream", err, "enable JetStream in the configuration of the server: jetstream { store_dir: .. }, and allow the user $JS.API.>")
		return
	}
	r.ok("jetstream", "on")
	if max := info.Limits.MaxStore; max > 0 && uint64(max) < info.Store+diskLeast {
		r.warn("storage", output.Bytes(uint64(max)-info.Store)+" of the account's limit are free", "raise max_file of the servers or the storage limit of the account")
	} else {
		r.ok("storage", "enough is free")
	}
	if err := b.Try(ctx); err != nil {
		fix := rpcerr.Fix(err)
		if fix == "" {
			fix = "allow the user $JS.API.> and rollout.>"
		}
		r.fail("write", err, fix)
	} else {
		r.ok("write", "a stream was created, written and deleted")
	}
	if got := b.Conn().MaxPayload(); got < bus.MaxPayload {
		r.fail("max_payload", fmt.Errorf("it is %s", output.Bytes(uint64(got))), fmt.Sprintf("set max_payload: %dMB on the servers", bus.MaxPayload>>20))
	} else {
		r.ok("max_payload", output.Bytes(uint64(got)))
	}
	streams(ctx, b, p, r)
}

// streams compares the settings of existing streams with the expected ones, and checks the clock.
func streams(ctx context.Context, b *bus.Bus, p Input, r *report) {
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
		r.warn("streams", fmt.Sprintf("not %d replicas: %s", wanted, strings.Join(wrong, ", ")), "start rolloutd, which updates the streams, or set nats.replicas")
	} else {
		r.ok("streams", fmt.Sprintf("%d streams with %d replicas", seen, wanted))
	}
	if !theirs.IsZero() {
		r.skew(theirs, began, p.Now().Sub(began))
	}
}

func ours(info *jetstream.StreamInfo) bool {
	name := info.Config.Name
	return name == names.EventStream || strings.HasPrefix(name, names.WorkStream("")) || strings.HasPrefix(name, names.TrajStream(""))
}
