package discovery

import (
	"context"
	"errors"
	"fmt"
	"time"

	consul "github.com/hashicorp/consul/api"
)

// Registration is a service that is kept registered.
type Registration struct {
	done chan struct{}
}

// Wait blocks until the registration has ended, that is until its context ended and the service was
// deregistered.
func (r *Registration) Wait() { <-r.done }

// Done is closed when Wait would return.
func (r *Registration) Done() <-chan struct{} { return r.done }

// Register registers s as passing and keeps it passing from its own goroutine: it renews the check
// three times a TTL and registers again when the agent forgot it (as after a restart of the agent).
// When ctx ends it deregisters (Wait for that) and stops. Register returns once the service is
// registered; while the agent does not answer it tries until ctx ends. ErrDenied and ErrService
// fail at once.
func (c *Client) Register(ctx context.Context, s Service) (*Registration, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	if s.TTL == 0 {
		s.TTL = DefaultTTL
	}
	if s.Reap == 0 {
		s.Reap = DefaultReap
	}
	retry := backoff{}
	for {
		err := c.register(ctx, s)
		if err == nil {
			break
		}
		if !errors.Is(err, ErrUnavailable) {
			return nil, err
		}
		retry.wait(ctx)
		if ctx.Err() != nil {
			return nil, err
		}
	}
	r := &Registration{done: make(chan struct{})}
	go func() {
		defer close(r.done)
		c.keep(ctx, s)
	}()
	return r, nil
}

// register registers and passes the check: an earlier registration of the same id may have left it
// critical.
func (c *Client) register(ctx context.Context, s Service) error {
	err := c.api.Agent().ServiceRegisterOpts(&consul.AgentServiceRegistration{
		ID: s.ID, Name: s.Name, Address: s.Address, Port: s.Port, Tags: s.Tags, Meta: s.Meta,
		Check: &consul.AgentServiceCheck{
			CheckID: checkID(s), TTL: s.TTL.String(), Status: consul.HealthPassing, DeregisterCriticalServiceAfter: s.Reap.String(),
		},
	}, consul.ServiceRegisterOpts{ReplaceExistingChecks: true}.WithContext(ctx))
	if err == nil {
		err = c.pass(ctx, s)
	}
	if err != nil {
		return fmt.Errorf("register service %s as %s: %w", s.Name, s.ID, mapError(err))
	}
	return nil
}

func (c *Client) pass(ctx context.Context, s Service) error {
	return c.api.Agent().UpdateTTLOpts(checkID(s), "serving", consul.HealthPassing, (&consul.QueryOptions{}).WithContext(ctx))
}

func checkID(s Service) string { return "service:" + s.ID }

// keep renews until ctx ends, then deregisters.
func (c *Client) keep(ctx context.Context, s Service) {
	tick := time.NewTicker(s.TTL / 3)
	defer tick.Stop()
	lost := false
	for {
		select {
		case <-ctx.Done():
			c.deregister(ctx, s)
			return
		case <-tick.C:
		}
		err := c.pass(ctx, s)
		var status consul.StatusError
		if errors.As(err, &status) { // the agent answers and does not know the check: versions differ in the code
			err = c.register(ctx, s)
		}
		switch {
		case err != nil && !lost && ctx.Err() == nil:
			lost = true
			c.log.Warn("registration can't be renewed, trying on", "service", s.Name, "id", s.ID, "error", err)
		case err == nil && lost:
			lost = false
			c.log.Info("registration renewed again", "service", s.Name, "id", s.ID)
		}
	}
}

// deregister tries once, briefly: the TTL removes the service anyway.
func (c *Client) deregister(ctx context.Context, s Service) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	err := c.api.Agent().ServiceDeregisterOpts(s.ID, (&consul.QueryOptions{}).WithContext(ctx))
	if err != nil {
		c.log.Debug("deregister failed; the TTL will end it", "service", s.Name, "id", s.ID, "error", err)
	}
}
