package bus_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/disk/disktest"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// A stream that could not write to a full disk takes messages again once there is space, without a
// restart of the process, and has every message that it acknowledged, once.
func TestEmbeddedContinuesAfterAFullDisk(t *testing.T) {
	t.Parallel()
	small := disktest.Mount(t, "8m")
	srv, err := bus.StartEmbedded(small.Dir, bus.EmbeddedOptions{Token: token, NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	var space atomic.Bool
	ctx, cancel := context.WithCancel(t.Context())
	var watch sync.WaitGroup
	watch.Go(func() { srv.Run(ctx, space.Load) })
	defer watch.Wait()
	defer cancel()
	b, err := bus.Connect(ctx, bus.Options{URL: srv.URL(), Token: token})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.EnsureRun(ctx, run); err != nil {
		t.Fatal(err)
	}
	group := func(id string) bus.Message {
		return bus.Message{Subject: names.WorkSubject(run), Body: &runv1.PromptGroup{RunId: id, RowJson: make([]byte, 64<<10)}, ID: id}
	}
	if err := b.Publish(ctx, group("before")); err != nil {
		t.Fatal(err)
	}
	small.Fill(0)
	published := make(chan error, 1)
	go func() { published <- b.Publish(ctx, group("meanwhile")) }()
	for srv.Writes() {
		select {
		case err := <-published:
			t.Fatalf("published on a full disk: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	small.Free()
	space.Store(true)
	if err := <-published; err != nil {
		t.Fatal(err)
	}
	if err := b.Publish(ctx, group("after")); err != nil {
		t.Fatal(err)
	}
	work, err := b.Work(ctx, run)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for len(got) < 3 {
		deliveries, err := work.Fetch(ctx, 10, 20*time.Second)
		if err != nil || len(deliveries) == 0 {
			t.Fatalf("after %v: %v", got, err)
		}
		for _, d := range deliveries {
			g := &runv1.PromptGroup{}
			if err := d.Decode(g); err != nil {
				t.Fatal(err)
			}
			got = append(got, g.GetRunId())
			_ = d.Ack()
		}
	}
	if got[0] != "before" || got[1] != "meanwhile" || got[2] != "after" {
		t.Errorf("received %v", got)
	}
}
