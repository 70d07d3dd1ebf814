package servertest

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"testing"
)

// S3 is a server that speaks S3 on files.
type S3 struct {
	*Process
	Endpoint             string // URL
	AccessKey, SecretKey string
	Dir                  string // a bucket is a directory in it
}

// StartS3 starts a server without a bucket.
func StartS3(t testing.TB) *S3 {
	t.Helper()
	address := local(freePorts(t, 1)[0])
	s := &S3{Endpoint: "http://" + address, AccessKey: "test-access-key", SecretKey: "test-secret-key", Dir: t.TempDir()}
	s.Process = start(t, "versitygw", []string{"--port", address, "--quiet", "posix", s.Dir},
		[]string{"ROOT_ACCESS_KEY=" + s.AccessKey, "ROOT_SECRET_KEY=" + s.SecretKey}, func() error { return listening(address) })
	return s
}

// GCS is a server that speaks Google Cloud Storage's JSON API on files.
type GCS struct {
	*Process
	Endpoint string // URL
}

// StartGCS starts a server with the given buckets.
func StartGCS(t testing.TB, buckets ...string) *GCS {
	t.Helper()
	port := freePorts(t, 1)[0]
	s := &GCS{Endpoint: "http://" + local(port)}
	s.Process = start(t, "fake-gcs-server", []string{"-scheme", "http", "-host", "127.0.0.1", "-port", strconv.Itoa(port),
		"-public-host", local(port), "-backend", "filesystem", "-filesystem-root", t.TempDir(), "-log-level", "error"}, nil,
		func() error { return listening(local(port)) })
	for _, bucket := range buckets {
		resp, err := http.Post(s.Endpoint+"/storage/v1/b?project=test", "application/json",
			bytes.NewBufferString(fmt.Sprintf(`{"name": %q}`, bucket)))
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("make bucket %s: HTTP %d %s", bucket, resp.StatusCode, body)
		}
	}
	return s
}
