package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
)

// Network is a store behind a network.
type Network struct {
	Server string // URL of the real server
	// Open creates an empty store that connects to the server at endpoint. It gives up a connection
	// that transfers nothing for a few hundred milliseconds.
	Open func(t *testing.T, endpoint string) blob.Store
}

// RunNetwork checks that a store survives the failures of networks and servers: it retries where
// that helps, does not accept truncated data, and recognizes its own writes after a lost answer.
func RunNetwork(t *testing.T, n Network) {
	for name, f := range map[string]Fault{
		"500": {Status: http.StatusInternalServerError}, "503": {Status: http.StatusServiceUnavailable},
		"Reset": {Reset: true}, "LostAnswer": {LoseAnswer: true},
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); operations(t, n, f) })
	}
	for name, f := range map[string]Fault{
		"BodyIsCut": {CutAfter: LargeBytes / 3}, "BodyStalls": {StallAfter: LargeBytes / 3}, "BodyStallsAtOnce": {StallAfter: 1},
		"BodyComesInBits": {Chunk: 1 << 10},
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); bodies(t, n, f) })
	}
	t.Run("FlippedBitIsSeen", func(t *testing.T) { t.Parallel(); flipped(t, n) })
	t.Run("DownIsUnavailable", func(t *testing.T) { t.Parallel(); down(t, n) })
}

// operations runs each operation with a fault at its first two requests.
func operations(t *testing.T, n Network, f Fault) {
	proxy := NewProxy(t, n.Server)
	s := n.Open(t, proxy.URL)
	big := Noise(2, LargeBytes)
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if proxy.Hits() == 0 {
			t.Errorf("%s was sent without the fault", what)
		}
	}
	proxy.Inject(f, 2, writes)
	_, err := s.Put(t.Context(), "small", strings.NewReader("0123456789"))
	check("put", err)
	proxy.Inject(f, 2, writes)
	_, err = s.Put(t.Context(), "big", bytes.NewReader(big))
	check("put in parts", err)
	proxy.Inject(f, 2, nil)
	_, err = s.Put(t.Context(), "small", strings.NewReader("other"))
	if !errors.Is(err, blob.ErrExists) {
		t.Errorf("put of an existing blob: %v", err)
	}
	proxy.Inject(f, 2, nil)
	info, err := s.Stat(t.Context(), "small")
	check("stat", err)
	if info.Size != 10 {
		t.Errorf("size %d", info.Size)
	}
	proxy.Inject(f, 2, nil)
	if got := read(t, s, "big", blob.Range{}); got != string(big) {
		t.Error("get: other bytes")
	}
	check("get", nil)
	proxy.Inject(f, 2, nil)
	keys := 0
	for _, err = range s.List(t.Context(), "") {
		keys++
	}
	check("list", err)
	if keys != 2 {
		t.Errorf("%d keys", keys)
	}
	proxy.Inject(f, 2, nil)
	check("delete", s.Delete(t.Context(), "small"))
	if _, err := s.Stat(t.Context(), "small"); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("after delete: %v", err)
	}
}

// writes are the requests that change something.
func writes(r *http.Request) bool { return r.Method == http.MethodPut || r.Method == http.MethodPost }

// bodies reads a large blob whose first two connections fail in the middle.
func bodies(t *testing.T, n Network, f Fault) {
	proxy := NewProxy(t, n.Server)
	s := n.Open(t, proxy.URL)
	data := Noise(3, LargeBytes)
	if _, err := s.Put(t.Context(), "k", bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	for _, r := range []blob.Range{{}, {Offset: 77}, {Offset: 3, Length: LargeBytes / 2}} {
		end := int64(LargeBytes)
		if r.Length > 0 {
			end = r.Offset + r.Length
		}
		proxy.Inject(f, 2, func(r *http.Request) bool { return r.Method == http.MethodGet })
		if got := read(t, s, "k", r); got != string(data[r.Offset:end]) {
			t.Errorf("%+v: other bytes", r)
		}
		if proxy.Hits() == 0 {
			t.Errorf("no request had the fault %+v", r)
		}
	}
}

func flipped(t *testing.T, n Network) {
	proxy := NewProxy(t, n.Server)
	s := n.Open(t, proxy.URL)
	for _, size := range []int{1 << 10, LargeBytes} {
		key := fmt.Sprint("k", size)
		if _, err := s.Put(t.Context(), key, bytes.NewReader(Noise(4, size))); err != nil {
			t.Fatal(err)
		}
		proxy.Inject(Fault{FlipAt: int64(size)}, 1, func(r *http.Request) bool { return r.Method == http.MethodGet })
		rc, err := s.Get(t.Context(), key, blob.Range{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(rc); !errors.Is(err, blob.ErrCorrupt) {
			t.Errorf("%d bytes with a flipped bit: %v", size, err)
		}
		rc.Close()
	}
}

// down asks a server that answers nothing but 503, then one that is gone.
func down(t *testing.T, n Network) {
	proxy := NewProxy(t, n.Server)
	s := n.Open(t, proxy.URL)
	proxy.Inject(Fault{Status: http.StatusServiceUnavailable}, -1, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := s.Stat(ctx, "k"); !errors.Is(err, blob.ErrUnavailable) {
		t.Errorf("a server that is down: %v", err)
	}
	short, cancelShort := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancelShort()
	if _, err := s.Stat(short, "k"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the context ended: %v", err)
	}
}
