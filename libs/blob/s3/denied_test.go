package s3

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Refused credentials name the server, the bucket, what was stored, the answer, and where the
// credentials are configured.
func TestRefusedCredentialsAreNamed(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`<Error><Code>SignatureDoesNotMatch</Code><Message>Check your key.</Message></Error>`))
	}))
	t.Cleanup(server.Close)
	s, err := Open(t.Context(), Config{
		Bucket: "runs", Endpoint: server.URL, AccessKey: "key", SecretKey: "old", Access: "blob.secret_key is read from env:S3SECRET",
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Put(t.Context(), "segments/7.seg", strings.NewReader("x"))
	if !errors.Is(err, blob.ErrDenied) {
		t.Fatalf("got %v", err)
	}
	for _, word := range []string{server.URL, `"runs"`, "put segments/7.seg", "403", "SignatureDoesNotMatch: Check your key", "env:S3SECRET"} {
		if !strings.Contains(rpcerr.Text(err), word) {
			t.Errorf("%q does not name %q", rpcerr.Text(err), word)
		}
	}
	if fix := rpcerr.Fix(err); !strings.Contains(fix, "correct the credentials") || !strings.Contains(fix, "env:S3SECRET") {
		t.Errorf("the fix is %q", fix)
	}
}
