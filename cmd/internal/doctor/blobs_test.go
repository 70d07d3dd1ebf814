package doctor_test

import (
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/doctor"
	"github.com/rollout-rl/rollout/libs/config"
)

// The finding says why the endpoint does not answer, not only that the check timed out.
func TestABucketThatDoesNotAnswerIsExplained(t *testing.T) {
	t.Parallel()
	c := config.Default(t.TempDir())
	c.Blob.URL, c.Blob.Endpoint, c.Blob.AccessKey, c.Blob.SecretKey = "s3://bucket", "http://127.0.0.1:1", "key", config.Env("SECRET")
	for _, f := range doctor.Check(t.Context(), doctor.Input{Config: c, Environ: []string{"SECRET=s"}, Now: time.Now}) {
		if f.Server == "blob" && (f.Status != doctor.Failed || !strings.Contains(f.Detail, "connection refused")) {
			t.Errorf("%+v", f)
		}
	}
}
