package bus_test

import (
	"testing"

	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

// BenchmarkPublish is batches of 64 messages of 2 KiB, acked, with and without an fsync each.
func BenchmarkPublish(b *testing.B) {
	for name, noSync := range map[string]bool{"sync": false, "nosync": true} {
		b.Run(name, func(b *testing.B) {
			srv, err := bus.StartEmbedded(b.TempDir(), bus.EmbeddedOptions{NoSync: noSync})
			if err != nil {
				b.Fatal(err)
			}
			defer srv.Stop()
			c, err := bus.Connect(b.Context(), bus.Options{URL: srv.URL()})
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			if err := c.EnsureRun(b.Context(), run); err != nil {
				b.Fatal(err)
			}
			var batch []bus.Message
			for range 64 {
				batch = append(batch, bus.Message{Subject: names.WorkSubject(run), Body: &runv1.PromptGroup{RowJson: make([]byte, 2048)}})
			}
			for b.Loop() {
				if err := c.Publish(b.Context(), batch...); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(64*b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}
