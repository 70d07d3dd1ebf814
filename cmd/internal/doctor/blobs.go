package doctor

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/backend"
	"github.com/rollout-rl/rollout/libs/blob"
)

// blobs writes an object twice, and reads, lists and deletes it.
func blobs(ctx context.Context, p Input, r *report) {
	if err := answers(ctx, p.Config.Blob.Endpoint); err != nil {
		r.fail("reach", err, "check blob.endpoint and the connection to it; an endpoint without TLS begins with http://")
		return
	}
	store, err := backend.Bucket(ctx, p.Config.Blob, p.Environ)
	if err != nil {
		r.fail("reach", err, fixOf(err, map[error]string{
			blob.ErrNoBucket: "create the bucket, or correct blob.url and blob.region",
			blob.ErrDenied:   "check blob.access_key with its secret, or the role of this host; it needs to list, read, create and delete objects",
		}, "check blob.endpoint and the connection of this host to it"))
		return
	}
	if store == nil {
		r.skip("reach", "files in the state folder")
		return
	}
	r.ok("reach", "")
	key, data := "doctor/"+strings.ToLower(rand.Text()), []byte("rollout doctor")
	began := p.Now()
	info, err := store.Put(ctx, key, bytes.NewReader(data))
	if err != nil {
		r.fail("write", err, "allow creating objects")
		return
	}
	between := p.Now().Sub(began)
	r.ok("write", "")
	if _, err := store.Put(ctx, key, bytes.NewReader(data)); !errors.Is(err, blob.ErrExists) {
		r.fail("create once", errors.Join(errors.New("a second write of the same key succeeded"), err), "the object store must support If-None-Match: *; use another or a newer one")
	} else {
		r.ok("create once", "a second write is rejected")
	}
	if got, err := readAll(ctx, store, key); err != nil || !bytes.Equal(got, data) {
		r.fail("read", fmt.Errorf("read %d of %d bytes: %w", len(got), len(data), err), "allow reading objects")
	} else {
		r.ok("read", "")
	}
	if err := store.Delete(ctx, key); err != nil {
		r.fail("delete", err, "allow deleting objects; rolloutd deletes payloads that it no longer needs")
	} else {
		r.ok("delete", "")
	}
	r.skew(info.Modified, began, between+time.Second) // object stores report whole seconds
}

// answers returns why an endpoint does not answer. The bucket client retries until the check times
// out and then only reports the timeout.
func answers(ctx context.Context, endpoint string) error {
	if endpoint == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodHead, endpoint, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("the object store does not answer: %w", err)
	}
	return response.Body.Close()
}

func readAll(ctx context.Context, store blob.Store, key string) ([]byte, error) {
	body, err := store.Get(ctx, key, blob.Range{})
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(body)
}
