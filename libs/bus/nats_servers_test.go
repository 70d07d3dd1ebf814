//go:build servers

package bus_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/bus/bustest"
	certs "github.com/rollout-rl/rollout/libs/cert"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/servertest"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Every way to prove who one is, in the clear and over TLS.
func TestExternalServer(t *testing.T) {
	t.Parallel()
	pair, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	seed, _ := pair.Seed()
	public, _ := pair.PublicKey()
	ca := servertest.NewCA(t)
	cert, key := ca.Issue(t, "server")
	for name, c := range map[string]struct {
		server servertest.NATSOptions
		client bus.Options
	}{
		"Token": {servertest.NATSOptions{Token: "s3cret"}, bus.Options{Token: "s3cret"}},
		"User":  {servertest.NATSOptions{User: "u", Password: "p"}, bus.Options{User: "u", Password: "p"}},
		"NKeyOverMutualTLS": {
			servertest.NATSOptions{NKey: public, Cert: cert, Key: key, ClientCA: ca.File},
			bus.Options{NKeySeed: string(seed), TLS: ca.Client(t)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.client.URL = servertest.StartNATS(t, c.server).URL()
			bustest.Run(t, c.client)
		})
	}
}

func TestTLSIsChecked(t *testing.T) {
	t.Parallel()
	ca := servertest.NewCA(t)
	cert, key := ca.Issue(t, "server")
	secure := servertest.StartNATS(t, servertest.NATSOptions{Token: "s3cret", Cert: cert, Key: key, ClientCA: ca.File})
	plain := servertest.StartNATS(t, servertest.NATSOptions{Token: "s3cret"})
	trusting := ca.Client(t)
	system, err := certs.Open(certs.Files{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]bus.Options{
		"an unknown authority":   {URL: secure.URL(), TLS: servertest.NewCA(t).Client(t)},
		"no certificate of ours": {URL: secure.URL(), TLS: ca.Anonymous(t)},
		"the system's":           {URL: secure.URL(), TLS: system},
		"a server without TLS":   {URL: plain.URL(), TLS: trusting},
	} {
		o.Token = "s3cret"
		if _, err := bus.Connect(t.Context(), o); !errors.Is(err, bus.ErrTLS) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestExternalServerIsKilled(t *testing.T) {
	t.Parallel()
	s := servertest.StartNATS(t, servertest.NATSOptions{Token: "s3cret"})
	bustest.RunCrash(t, bustest.Crashable{
		Options: bus.Options{URL: s.URL(), Token: "s3cret"}, Kill: func(string) { s.Nodes[0].Kill() }, Start: s.Nodes[0].Start,
	})
}

func TestCluster(t *testing.T) {
	t.Parallel()
	s := servertest.StartNATS(t, servertest.NATSOptions{Token: "s3cret", Nodes: 3})
	o := bus.Options{URL: s.URL(), Token: "s3cret"}
	t.Run("Suite", func(t *testing.T) { bustest.Run(t, o) })
	t.Run("LeaderIsKilled", func(t *testing.T) {
		b, err := bus.Connect(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		var killed *servertest.Process
		bustest.RunCrash(t, bustest.Crashable{
			Options: o,
			Kill: func(stream string) {
				info := describe(t, b, stream)
				if info.Config.Replicas != 3 || len(info.Cluster.Replicas) != 2 {
					t.Errorf("stream %s: %d replicas, %d peers", stream, info.Config.Replicas, len(info.Cluster.Replicas))
				}
				killed = s.Node(t, info.Cluster.Leader)
				killed.Kill()
			},
			Start: func() { killed.Start() },
		})
	})
}

// A stream without a majority of its nodes is not reported as deleted.
func TestNoQuorum(t *testing.T) {
	t.Parallel()
	s := servertest.StartNATS(t, servertest.NATSOptions{Token: "s3cret", Nodes: 3})
	b, err := bus.Connect(t.Context(), bus.Options{URL: s.URL(), Token: "s3cret"})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.EnsureRun(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	message := bus.Message{Subject: names.WorkSubject(run), Body: &runv1.PromptGroup{}, ID: "one"}
	for _, node := range s.Nodes[1:] {
		node.Kill()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	defer cancel()
	if err := b.Publish(ctx, message); rpcerr.Code(err) != codes.Unavailable {
		t.Errorf("without a majority: %v", err)
	}
	for _, node := range s.Nodes[1:] {
		node.Launch()
	}
	if err := b.Publish(t.Context(), message); err != nil {
		t.Error(err)
	}
}

// throughBlackhole is a connection, with a run's streams, to the node of a cluster that drops
// messages of some subjects.
func throughBlackhole(t *testing.T, subjects string) *bus.Bus {
	t.Helper()
	s := servertest.StartNATS(t, servertest.NATSOptions{Token: "s3cret", Nodes: 3, Blackhole: subjects})
	b, err := bus.Connect(t.Context(), bus.Options{URL: s.URLs[0], Token: "s3cret"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	if err := b.EnsureRun(t.Context(), run); err != nil {
		t.Fatal(err)
	}
	return b
}

// The connection moves away from a server that drops messages of an existing stream.
func TestPublishLeavesServerThatDropsMessages(t *testing.T) {
	t.Parallel()
	b := throughBlackhole(t, "rollout.work.>")
	first := b.Conn().ConnectedServerName()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.Publish(ctx, bus.Message{Subject: names.WorkSubject(run), Body: &runv1.PromptGroup{}, ID: "one"}); err != nil {
		t.Fatal(err)
	}
	if name := b.Conn().ConnectedServerName(); name == first {
		t.Errorf("published through %s", name)
	}
}

// A deadline that passes while a message waits for its ack is an outage of the servers.
func TestPublishWithoutAckUntilTheDeadline(t *testing.T) {
	t.Parallel()
	b := throughBlackhole(t, "rollout.work.>")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := b.Publish(ctx, bus.Message{Subject: names.WorkSubject(run), Body: &runv1.PromptGroup{}, ID: "one"})
	if rpcerr.Code(err) != codes.Unavailable || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// The connection moves away from a server that drops the requests of a consumer.
func TestFetchesLeaveServerThatDropsRequests(t *testing.T) {
	t.Parallel()
	b := throughBlackhole(t, "$JS.API.CONSUMER.MSG.NEXT.>")
	if err := b.Publish(t.Context(), bus.Message{Subject: names.WorkSubject(run), Body: &runv1.PromptGroup{}, ID: "one"}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	refused := 0
	for ctx.Err() == nil {
		var got []*bus.Delivery
		work, err := b.Work(ctx, run) // as callers do after an error
		if err == nil {
			got, err = work.Fetch(ctx, 1, 5*time.Second)
		}
		if len(got) == 1 && refused > 0 {
			return
		}
		if len(got) > 0 || err != nil && rpcerr.Code(err) != codes.Unavailable {
			t.Fatalf("%d deliveries after %d refusals: %v", len(got), refused, err)
		}
		if err != nil {
			refused++
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	t.Fatalf("refused %d times through %s", refused, b.Conn().ConnectedServerName())
}

func TestTooManyReplicas(t *testing.T) {
	t.Parallel()
	b, err := bus.Connect(t.Context(), bus.Options{URL: start(t, t.TempDir(), 0).URL(), Token: token, Replicas: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.EnsureRun(t.Context(), run); !errors.Is(err, bus.ErrReplicas) {
		t.Error(err)
	}
}

func describe(t *testing.T, b *bus.Bus, stream string) *jetstream.StreamInfo {
	t.Helper()
	s, err := b.JetStream().Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo()
}
