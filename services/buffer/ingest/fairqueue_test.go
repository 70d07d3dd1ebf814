package ingest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
)

// Runs that always have work get the same bytes, whatever their batches are: at no time is one
// ahead of another by more than a batch of each.
func TestTheQueueIsFairByBytes(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		dice := rand.New(rand.NewPCG(seed, 3))
		g := NewFairQueue(1)
		leave, err := g.Enter(t.Context(), "first", 1)
		if err != nil {
			t.Fatal(err)
		}
		type client struct {
			entry      *entry
			most       uint64
			cost, done uint64
		}
		clients := make([]*client, 2+dice.IntN(4))
		for i := range clients {
			clients[i] = &client{most: 1 << (4 * i)}
			clients[i].cost = 1 + dice.Uint64N(clients[i].most)
			clients[i].entry = g.queue(fmt.Sprint(i), clients[i].cost)
		}
		for range 4000 {
			leave() // lets one in
			for i, c := range clients {
				select {
				case <-c.entry.open:
					c.done += c.cost
					c.cost = 1 + dice.Uint64N(c.most)
					c.entry = g.queue(fmt.Sprint(i), c.cost)
				default:
				}
			}
			for i, a := range clients {
				for j, b := range clients[:i] {
					if ahead := int64(a.done) - int64(b.done); ahead > int64(a.most+b.most) || -ahead > int64(a.most+b.most) {
						t.Fatalf("seed %d: %d has %d bytes, %d has %d; a batch is at most %d and %d", seed, i, a.done, j, b.done, a.most, b.most)
					}
				}
			}
			leave = g.leave
		}
	}
}

// A run that was idle has no credit, and a run that was busy does not wait for it to catch up.
func TestAnIdleRunSavesUpNoCredit(t *testing.T) {
	t.Parallel()
	g := NewFairQueue(1)
	for range 1000 {
		leave, err := g.Enter(t.Context(), "old", 1000)
		if err != nil {
			t.Fatal(err)
		}
		leave()
	}
	leave, err := g.Enter(t.Context(), "old", 1000)
	if err != nil {
		t.Fatal(err)
	}
	young, old := g.queue("young", 1000), g.queue("old", 1000)
	leave()
	<-young.open
	young = g.queue("young", 1000)
	g.leave()
	<-old.open
	g.leave()
	<-young.open
}

func TestTheQueueLosesNoSlot(t *testing.T) {
	t.Parallel()
	g := NewFairQueue(1)
	leave, err := g.Enter(t.Context(), "a", 1)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := g.Enter(ctx, "b", 1); !errors.Is(err, context.Canceled) {
		t.Fatalf("%v", err)
	}
	leave()
	leave, err = g.Enter(t.Context(), "c", 1)
	if err != nil {
		t.Fatal(err)
	}
	leave()
	if g.Forget("a"); g.free != 1 || len(g.waiting) != 0 || len(g.ends) != 2 {
		t.Errorf("%d slots, %d waiting, %d runs", g.free, len(g.waiting), len(g.ends))
	}
}
