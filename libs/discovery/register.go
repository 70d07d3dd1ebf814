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

// Register registers s as passing and keeps it passing from its own goroutine. It renews the check
// three times per TTL, and registers again if the agent does not know the check, for example after
// a restart of the agent. When ctx ends, it deregisters (see Wait) and stops. Register returns
// after the first registration; while the agent does not answer, it retries until ctx ends.
// ErrDenied and ErrService are returned at once.
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
	if c.seal != nil {
		s.Meta = c.seal.Sign(s)
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

// register registers the service and passes the check, because an earlier registration with the
// same id may have left it critical.
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
		if errors.As(err, &status) { // the agent does not know the check; the code depends on its version
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
