package main

import (
	"context"
	"os"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/discovery"
	"github.com/rollout-rl/rollout/proto/gen/names"
)

// announcement tells the world that this process serves: discovery first, then health, then rolloutd.json. It is the last
// component, so that it withdraws before anything stops.
type announcement struct {
	m        *mesh
	services []discovery.Service
	runtime  config.Runtime
}

func (m *mesh) announcement(targets []target, gateway string) *announcement {
	a := &announcement{m: m, runtime: config.Runtime{
		PID: os.Getpid(), GRPC: m.endpoints.grpc, Gateway: gateway, NATS: m.endpoints.nats, Consul: m.endpoints.consul,
		TokenFile: m.endpoints.tokenFile, KeysFile: m.endpoints.keysFile, CAFile: m.cfg.TLS.CAFile, CertFile: m.cfg.TLS.CertFile, KeyFile: m.cfg.TLS.KeyFile, Version: version,
	}}
	for _, t := range targets {
		a.runtime.Targets = append(a.runtime.Targets, t.name)
		if t.make == nil || m.elected(t.name) { // a leader registers itself, see lead
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

func (a *announcement) run(ctx context.Context) error {
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
	if err := rememberPorts(a.m.cfg.StateDir, a.runtime); err != nil {
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
