package doctor_test

import (
	"testing"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/doctor"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/libs/config"
)

// The check creates and removes a stream, as a run would.
func TestNATSIsWrittenTo(t *testing.T) {
	t.Parallel()
	srv, err := bus.StartEmbedded(t.TempDir(), bus.EmbeddedOptions{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	c := config.Default(t.TempDir())
	c.NATS.URL = srv.URL()
	checks := map[string]doctor.Status{}
	for _, f := range doctor.Check(t.Context(), doctor.Input{Config: c, Now: time.Now}) {
		if f.Server == "nats" {
			checks[f.Check] = f.Status
		}
	}
	for _, check := range []string{"reach", "jetstream", "storage", "write", "streams"} {
		if checks[check] != doctor.OK {
			t.Errorf("%s is %q: %v", check, checks[check], checks)
		}
	}
	b, err := bus.Connect(t.Context(), bus.Options{URL: srv.URL()})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for name := range b.JetStream().StreamNames(t.Context()).Name() {
		t.Errorf("the doctor left %s", name)
	}
}
