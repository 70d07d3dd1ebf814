package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	consul "github.com/hashicorp/consul/api"

	"github.com/rollout-rl/rollout/libs/cert"
)

const (
	firstBackoff = 50 * time.Millisecond
	maxBackoff   = 2 * time.Second
	blockingWait = 30 * time.Second // of one watch query, after which a lost connection is detected
)

// Client talks to one Consul agent. Its methods may be called from many goroutines.
type Client struct {
	api     *consul.Client
	seal    *Seal
	log     *slog.Logger
	foreign sync.Map // registrations that were reported as not authentic
}

// Options has the address of the agent and the access to it.
type Options struct {
	Address string       // "host:port", or an URL: https:// asks for TLS
	Token   string       // ACL token; "" sends none
	TLS     *cert.Source // for https; nil trusts the system's authorities
	Seal    *Seal        // signs services, and watches omit those without a valid signature; nil: neither
	Log     *slog.Logger // nil discards
}

// exactly makes a client that uses only Options. By default Consul's client also reads CONSUL_*
// variables, which may have been set for other tools.
type exactly struct {
	token string
	next  http.RoundTripper
}

func (e exactly) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Del("X-Consul-Token")
	if e.token != "" {
		req.Header.Set("X-Consul-Token", e.token)
	}
	values := req.URL.Query()
	values.Del("ns")
	values.Del("partition")
	req.URL.RawQuery = values.Encode()
	return e.next.RoundTrip(req)
}

// anonymous is Consul's name of no token. With it the client looks for none in the environment; it
// is never sent.
const anonymous = "anonymous"

// NewClient makes a client. No request is sent, and no variable of the environment counts.
func NewClient(o Options) (*Client, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 32, IdleConnTimeout: 90 * time.Second, Proxy: nil}
	if o.TLS != nil {
		transport.DialTLSContext = o.TLS.Dial
	}
	api, err := consul.NewClient(&consul.Config{
		Address: o.Address, Scheme: "http", Token: anonymous,
		HttpClient: &http.Client{Transport: exactly{token: o.Token, next: transport}},
	})
	if err != nil {
		return nil, fmt.Errorf("discovery client for %s: %w", o.Address, err)
	}
	return &Client{api: api, seal: o.Seal, log: o.Log}, nil
}

// Ready returns nil when the agent answers and takes the token. ErrUnavailable, ErrDenied.
func (c *Client) Ready(ctx context.Context) error {
	_, err := c.api.Agent().ServicesWithFilterOpts("", (&consul.QueryOptions{}).WithContext(ctx))
	if err != nil {
		return fmt.Errorf("reach the Consul agent: %w", mapError(err))
	}
	return nil
}

// Describe gives the agent's version and the address of the leader of its cluster. ErrUnavailable,
// ErrDenied.
func (c *Client) Describe(ctx context.Context) (version, leader string, err error) {
	q := (&consul.QueryOptions{}).WithContext(ctx)
	if leader, err = c.api.Status().LeaderWithQueryOptions(q); err != nil {
		return "", "", fmt.Errorf("ask for the leader: %w", mapError(err))
	}
	var self map[string]map[string]any
	if _, err := c.api.Raw().Query("/v1/agent/self", &self, q); err != nil {
		return "", leader, fmt.Errorf("ask the agent who it is: %w", mapError(err))
	}
	version, _ = self["Config"]["Version"].(string)
	return version, leader, nil
}

// Lookup returns the passing instances of a service now, sorted by id; none is no error.
func (c *Client) Lookup(ctx context.Context, name string) ([]Instance, error) {
	list, _, err := c.query(ctx, name, 0, 0)
	return list, err
}

func (c *Client) query(ctx context.Context, name string, index uint64, wait time.Duration) ([]Instance, uint64, error) {
	q := (&consul.QueryOptions{WaitIndex: index, WaitTime: wait}).WithContext(ctx)
	entries, meta, err := c.api.Health().Service(name, "", true, q)
	if err != nil {
		return nil, 0, fmt.Errorf("look up service %s: %w", name, mapError(err))
	}
	list := make([]Instance, 0, len(entries))
	for _, e := range entries {
		host := e.Service.Address
		if host == "" {
			host = e.Node.Address
		}
		list = append(list, Instance{
			Name: e.Service.Service, ID: e.Service.ID, Address: net.JoinHostPort(host, strconv.Itoa(e.Service.Port)),
			Tags: e.Service.Tags, Meta: e.Service.Meta,
		})
	}
	sortByID(list)
	return list, meta.LastIndex, nil
}

// Watch sends the passing instances of a service: when they are first known, and on every change. A
// slow reader gets only the newest list. While the agent does not answer, the last list stays
// valid. A restarted agent, which knows no instances at first, gets a few seconds for running
// instances to register again. The channel is closed after ctx ended.
func (c *Client) Watch(ctx context.Context, name string) <-chan []Instance {
	out := make(chan []Instance, 1)
	go func() {
		defer close(out)
		c.watch(ctx, name, func(list []Instance) {
			select { // this goroutine is the only sender, so there is room after draining
			case <-out:
			default:
			}
			out <- list
		})
	}()
	return out
}

// watch calls send with each new list until ctx ends.
func (c *Client) watch(ctx context.Context, name string, send func([]Instance)) {
	var index uint64
	var last []Instance
	var kept keep
	first := true
	retry := backoff{}
	for ctx.Err() == nil {
		list, next, err := c.query(ctx, name, index, kept.wait(time.Now()))
		if err != nil {
			if ctx.Err() == nil {
				c.log.Debug("watch of a service failed, trying again", "service", name, "error", err)
			}
			index = 0 // a new agent restarts its index
			kept.lost = true
			retry.wait(ctx)
			continue
		}
		retry = backoff{}
		if next < index { // another agent, or one that restarted between two queries
			next, kept.lost = 0, true
		}
		index = next
		list = kept.merge(c.authentic(name, list), last, time.Now())
		if first || !equal(list, last) {
			first, last = false, list
			send(list)
		}
	}
}

// resettle is how long instances are kept after an outage if the agent does not know them: running
// instances register again within a third of DefaultTTL.
const resettle = DefaultTTL + time.Second

// keep keeps the instances from before an outage of the agent, because a restarted agent knows no
// instances for a second.
type keep struct {
	lost  bool // the agent did not answer since the last list
	until time.Time
}

// wait is how long the next query may block.
func (k *keep) wait(now time.Time) time.Duration {
	if k.until.IsZero() {
		return blockingWait
	}
	return min(blockingWait, max(time.Millisecond, k.until.Sub(now)))
}

// merge adds to list those of last that it lacks, while they are kept.
func (k *keep) merge(list, last []Instance, now time.Time) []Instance {
	if k.lost {
		k.lost, k.until = false, now.Add(resettle)
	}
	if !now.Before(k.until) {
		k.until = time.Time{}
		return list
	}
	merged := list
	for _, old := range last {
		if !slices.ContainsFunc(list, func(i Instance) bool { return i.ID == old.ID }) {
			merged = append(merged, old)
		}
	}
	if len(merged) == len(list) {
		k.until = time.Time{} // all are back
	}
	sortByID(merged)
	return merged
}

// backoff doubles from firstBackoff to maxBackoff.
type backoff struct{ next time.Duration }

func (b *backoff) wait(ctx context.Context) {
	b.next = min(max(2*b.next, firstBackoff), maxBackoff)
	t := time.NewTimer(b.next)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// mapError turns the client's errors into this package's; context errors stay.
func mapError(err error) error {
	var status consul.StatusError
	switch {
	case errors.Is(err, context.Canceled):
		return err
	case !errors.As(err, &status): // also a deadline that has passed
		return ErrUnavailable.Wrap(err)
	case status.Code == http.StatusForbidden, status.Code == http.StatusUnauthorized:
		return ErrDenied.Wrap(err)
	case status.Code >= http.StatusInternalServerError:
		return ErrUnavailable.Wrap(err)
	}
	return err
}
