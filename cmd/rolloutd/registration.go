package main

import (
	"context"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// registration publishes that this process serves: in discovery, then as its health, then in
// rolloutd.json. It is the last component, so that it is withdrawn before any other stops.
type registration struct {
	m        *mesh
	services []discovery.Service
	runtime  config.Runtime
}

func (m *mesh) registration(targets []target, gateway string) *registration {
	a := &registration{m: m, runtime: config.Runtime{
		PID: os.Getpid(), GRPC: m.endpoints.grpc, Gateway: gateway, NATS: m.endpoints.nats, Consul: m.endpoints.consul,
		TokenFile: m.endpoints.tokenFile, CAFile: m.cfg.TLS.CAFile, CertFile: m.cfg.TLS.CertFile, KeyFile: m.cfg.TLS.KeyFile, Version: version,
	}}
	for _, t := range targets {
		a.runtime.Targets = append(a.runtime.Targets, t.name)
		if t.make == nil || m.elected(t.name) { // leaders register themselves, see registerLeader
			continue
		}
		s := m.instance(t.name)
		if t.name == names.GatewayService {
			s.Meta["url"] = gateway
		}
		a.services = append(a.services, s)
	}
	return a
}

func (a *registration) run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	registered := make(chan error, len(a.services))
	for _, s := range a.services {
		wg.Go(func() {
			r, err := a.m.discovery.Register(ctx, s)
			registered <- err
			if err == nil {
				r.Wait()
			}
		})
	}
	for range a.services {
		if err := <-registered; err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
	a.m.server.SetServing()
	if err := savePorts(a.m.cfg.StateDir, a.runtime); err != nil {
		return err
	}
	file := a.m.cfg.RuntimeFile()
	if err := config.WriteRuntime(file, a.runtime); err != nil {
		return err
	}
	defer os.Remove(file)
	a.m.log.Info("serving", "targets", a.runtime.Targets, "grpc", a.runtime.GRPC, "gateway", a.runtime.Gateway,
		"nats", a.runtime.NATS, "consul", a.runtime.Consul, "ready_after", time.Since(a.m.began).Round(time.Millisecond))
	<-ctx.Done()
	return nil
}

var errOtherMesh = rpcerr.New(codes.FailedPrecondition, "ROLLOUTD_OTHER_MESH", "the services of another control plane are registered in Consul").
	Fix("give each control plane its own Consul (or datacenter) and NATS account; if they are the same one, give both the same token_file and restart")

// metaMesh is the metadata key of meshID.
const metaMesh = "mesh"

// meshID identifies the control plane by its token, which all its processes share. It is 16 bits of
// a hash: enough to notice a shared Consul, and too few to guess the token from.
func meshID(token string) string {
	digest := id.Content([]byte("rollout mesh\x00" + token))
	return digest[strings.LastIndex(digest, "-")+1:][:4]
}

// checkMesh returns an error if services of another control plane are registered under the names of
// this one: calls would be routed to both.
func (m *mesh) checkMesh(ctx context.Context) error {
	for _, t := range targets {
		if t.make == nil {
			continue
		}
		known, err := m.discovery.Lookup(ctx, t.name)
		if err != nil {
			return err
		}
		for _, other := range known {
			if mesh := other.Meta[metaMesh]; mesh != "" && mesh != m.meta[metaMesh] {
				return errOtherMesh.WithMessage("%s at %s belongs to another control plane: its token differs", t.name, other.Address)
			}
		}
	}
	return nil
}
