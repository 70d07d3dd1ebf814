package bustest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// Crashable are servers that a test kills and starts again.
type Crashable struct {
	Options bus.Options
	// Kill ends a server with SIGKILL: in a cluster the one that leads the stream.
	Kill  func(stream string)
	Start func() // returns when all serve
}

const (
	crashPublishers = 4
	crashMessages   = 400 // of each publisher
	crashAt         = 600 // acks before the kill
)

// RunCrash kills a server while messages are published: every message that was acked is there
// afterwards, and none is there twice. The servers must be the test's own.
func RunCrash(t *testing.T, c Crashable) {
	b := setup(t, c.Options)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var mu sync.Mutex
	acked, crash := 0, make(chan struct{})
	var wg sync.WaitGroup
	for p := range crashPublishers {
		publisher := connect(t, c.Options)
		wg.Go(func() {
			for i := range crashMessages {
				m := bus.Message{Subject: names.WorkSubject(b.run), Body: b.group(p*crashMessages + i), ID: fmt.Sprintf("%s/%d/%d", b.run, p, i)}
				if err := publisher.Publish(ctx, m); err != nil {
					t.Errorf("message %d of publisher %d: %v", i, p, err)
					return
				}
				mu.Lock()
				if acked++; acked == crashAt {
					close(crash)
				}
				mu.Unlock()
			}
		})
	}
	<-crash
	c.Kill(names.WorkStream(b.run))
	c.Start()
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	if acked != crashPublishers*crashMessages {
		t.Fatalf("%d of %d messages were acked", acked, crashPublishers*crashMessages)
	}
	counts := make([]int, acked)
	for left := acked; left > 0; {
		got, err := b.work.Fetch(ctx, 256, 10*time.Second)
		if ctx.Err() != nil {
			t.Fatalf("%d acked messages did not come: %v", left, err)
		}
		for _, d := range got { // an error is the reconnect; unacked messages are delivered again
			var g runv1.PromptGroup
			if err := d.Decode(&g); err != nil {
				t.Fatal(err)
			}
			if counts[g.GetIndex()]++; counts[g.GetIndex()] == 1 {
				left--
			} else if d.Attempt() == 1 {
				t.Errorf("message %d is stored twice", g.GetIndex())
			}
			if err := d.Ack(); err != nil {
				t.Fatal(err)
			}
		}
	}
	for { // acks may be lost, and messages that were unacked when the server died are delivered again
		d, err := b.work.Depth(ctx)
		if err == nil && d == (bus.Depth{}) {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("left: %+v", d)
		}
		got, _ := b.work.Fetch(ctx, 256, 100*time.Millisecond)
		for _, d := range got {
			if d.Attempt() == 1 {
				t.Error("a message is stored twice")
			}
			_ = d.Ack()
		}
	}
}
