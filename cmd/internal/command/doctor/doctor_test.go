package doctor

import (
	"bytes"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/rollout-rl/rollout/cmd/internal/doctor"
)

// TestFindings compares the text of each kind of finding with a golden file.
func TestFindings(t *testing.T) {
	t.Parallel()
	findings := []doctor.Finding{
		{Server: "state", Check: "disk", Status: doctor.OK, Detail: "enough is free"},
		{Server: "database", Check: "reach", Status: doctor.Skipped, Detail: "SQLite files in the state folder"},
		{Server: "nats", Check: "streams", Status: doctor.Warning, Detail: "not 3 replicas: EVENTS has 1", Fix: "start rolloutd"},
		{Server: "blob", Check: "write", Status: doctor.Failed, Detail: "refused", Fix: "allow creating objects"},
	}
	for _, format := range []string{"text", "json"} {
		var out bytes.Buffer
		if err := writeFindings(&out, format == "json", findings); err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile("testdata/findings." + format)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), out.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", format, diff)
		}
	}
}
