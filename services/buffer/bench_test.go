package buffer_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/proto/gen/names"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer"
	"github.com/rollout-rl/rollout/services/buffer/sqlstore"
)

// cpu is the processor time of this process. Unlike wall time it does not depend on other
// processes.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

const (
	benchGroups = 32
	benchSize   = 8
)

// stepOf is the messages of a step: 32 groups of 8 samples, about 600 bytes per payload, one
// message per group.
func stepOf(b *testing.B, c *bufferv1.LedgerConfig, step uint64) (out [][]*trajectoryv1.TrajectoryEnvelope) {
	b.Helper()
	for g := range uint64(benchGroups) {
		p := (step-1)*benchGroups + g
		var message []*trajectoryv1.TrajectoryEnvelope
		for n := range uint32(benchSize) {
			e := ofVersion(sampleOf(0, 0, n), step-1)
			e.Header.GroupSize = benchSize
			e.Header.Key.Epoch, e.Header.Key.Index = uint32(p/c.GetRows()), p%c.GetRows()
			message = append(message, seal(e.Header))
		}
		out = append(out, message)
	}
	return out
}

func benchConfig() *bufferv1.LedgerConfig {
	return &bufferv1.LedgerConfig{GroupsPerStep: benchGroups, GroupSize: benchSize, Order: bufferv1.LeaseOrder_LEASE_ORDER_POSITION,
		Rows: 10_000, Receipts: true}
}

// BenchmarkLedger measures a step of 256 samples with its syncs and without a stream: one ingest,
// lease, and commit.
func BenchmarkLedger(b *testing.B) {
	store, err := sqlstore.Open(b.Context(), sqldb.Files(b.TempDir()))
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	s, err := buffer.New(buffer.Config{Segments: b.TempDir()}, buffer.Deps{Store: store})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Stop()
	c := benchConfig()
	ctx := b.Context()
	if _, err := s.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{RunId: run, Config: c}); err != nil {
		b.Fatal(err)
	}
	if _, err := s.RecordWeights(ctx, &bufferv1.RecordWeightsRequest{RunId: run, Digest: digest(0)}); err != nil {
		b.Fatal(err)
	}
	var spent [3]time.Duration
	var busy time.Duration
	step := uint64(0)
	for b.Loop() {
		step++
		b.StopTimer()
		var all []*trajectoryv1.TrajectoryEnvelope
		for _, m := range stepOf(b, c, step) {
			all = append(all, m...)
		}
		b.StartTimer()
		began, before := time.Now(), cpu()
		if _, err := s.Accept(ctx, run, all); err != nil {
			b.Fatal(err)
		}
		spent[0] += time.Since(began)
		began = time.Now()
		r, err := s.LeaseBatch(ctx, &bufferv1.LeaseBatchRequest{RunId: run, Step: step})
		if err != nil || len(r.GetBatch().GetSamples()) != benchGroups*benchSize {
			b.Fatalf("%v %v", r, err)
		}
		spent[1] += time.Since(began)
		began = time.Now()
		if _, err := s.CommitStep(ctx, &bufferv1.CommitStepRequest{RunId: run, Step: step, BatchId: r.GetBatch().GetBatchId(), WeightsDigest: digest(step)}); err != nil {
			b.Fatal(err)
		}
		spent[2] += time.Since(began)
		busy += cpu() - before
	}
	b.ReportMetric(busy.Seconds()*1e3/float64(b.N), "cpu-ms")
	for i, name := range []string{"ingest-ms", "lease-ms", "commit-ms"} {
		b.ReportMetric(spent[i].Seconds()*1e3/float64(b.N), name)
	}
}

// BenchmarkStep measures a step of a run: 32 messages of 8 samples through NATS and gRPC, from the
// first publish to the end of the commit. In "spread" the messages are 1 ms apart, as from a worker
// that finishes groups one by one.
func BenchmarkStep(b *testing.B) {
	for name, gap := range map[string]time.Duration{"burst": 0, "spread": time.Millisecond} {
		b.Run(name, func(b *testing.B) {
			s := setup(b)
			s.stop()
			s.cfg.SegmentBytes = 0
			s.start()
			c := benchConfig()
			s.open(c)
			s.record(0)
			var last, busy time.Duration
			step := uint64(0)
			for b.Loop() {
				step++
				b.StopTimer()
				messages := stepOf(b, c, step)
				b.StartTimer()
				before := cpu()
				var all []bus.Message
				for _, m := range messages {
					all = append(all, bus.Message{Subject: names.TrajSubject(run), Body: &trajectoryv1.TrajectoryBatch{Trajectories: m}})
				}
				if gap == 0 {
					if err := s.bus.Publish(b.Context(), all...); err != nil {
						b.Fatal(err)
					}
				}
				for _, m := range all {
					if gap == 0 {
						break
					}
					<-time.After(gap)
					if err := s.bus.Publish(b.Context(), m); err != nil {
						b.Fatal(err)
					}
				}
				published := time.Now()
				batch := s.lease(step)
				last += time.Since(published)
				s.commit(batch)
				busy += cpu() - before
			}
			b.ReportMetric(busy.Seconds()*1e3/float64(b.N), "cpu-ms")
			b.ReportMetric(last.Seconds()*1e3/float64(b.N), "last-publish-to-lease-ms")
		})
	}
}
