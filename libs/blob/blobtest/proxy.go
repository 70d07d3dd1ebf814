package blobtest

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
)

// Fault is a failure that the proxy causes in a request or an answer. The zero Fault causes none.
type Fault struct {
	Status     int   // return this status without calling the server
	Reset      bool  // drop the connection without asking the server
	LoseAnswer bool  // ask the server, then drop the connection
	CutAfter   int64 // pass this many bytes of the answer's body, then drop the connection
	StallAfter int64 // pass this many bytes of the answer's body, then send nothing more
	Chunk      int   // pass the answer's body in pieces of this size
	FlipAt     int64 // flip a bit of this byte of the answer's body, counted from 1
}

// Proxy forwards requests between a client and an HTTP server, and injects faults.
type Proxy struct {
	URL    string
	target *url.URL

	mu    sync.Mutex
	fault Fault
	times int
	match func(*http.Request) bool
	hits  int
}

// NewProxy starts a proxy for the server at target (an URL). It ends with the test.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	u, err := url.Parse(target)
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{target: u}
	forward := &httputil.ReverseProxy{
		Rewrite:        func(r *httputil.ProxyRequest) { r.SetURL(u); r.Out.Host = r.In.Host }, // the host is part of S3's signature
		ModifyResponse: p.rewriteLocation,
		FlushInterval:  -1,
		ErrorHandler:   func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { p.serve(w, r, forward) }))
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	p.URL = s.URL
	return p
}

// Inject applies the fault to the next times requests that match (nil: all).
func (p *Proxy) Inject(f Fault, times int, match func(*http.Request) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fault, p.times, p.match, p.hits = f, times, match, 0
}

// Hits returns the number of requests with a fault since Inject.
func (p *Proxy) Hits() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hits
}

func (p *Proxy) next(r *http.Request) Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.times == 0 || p.match != nil && !p.match(r) {
		return Fault{}
	}
	p.times--
	p.hits++
	return p.fault
}

func (p *Proxy) serve(w http.ResponseWriter, r *http.Request, forward http.Handler) {
	f := p.next(r)
	switch {
	case f.Status > 0:
		_, _ = io.Copy(io.Discard, r.Body) // the client sends on
		w.WriteHeader(f.Status)
	case f.Reset:
		panic(http.ErrAbortHandler)
	case f.LoseAnswer:
		forward.ServeHTTP(httptest.NewRecorder(), r)
		panic(http.ErrAbortHandler)
	default:
		forward.ServeHTTP(&spoiler{ResponseWriter: w, f: f, r: r}, r)
	}
}

// rewriteLocation changes the addresses of uploads that the server returns, so that they lead to
// the proxy.
func (p *Proxy) rewriteLocation(resp *http.Response) error {
	if l := resp.Header.Get("Location"); l != "" {
		resp.Header.Set("Location", strings.Replace(l, p.target.String(), p.URL, 1))
	}
	return nil
}

// spoiler applies a fault to the body of an answer.
type spoiler struct {
	http.ResponseWriter
	f    Fault
	r    *http.Request
	sent int64
}

func (s *spoiler) Unwrap() http.ResponseWriter { return s.ResponseWriter }

func (s *spoiler) Write(b []byte) (int, error) {
	total := len(b)
	if i := s.f.FlipAt - 1 - s.sent; s.f.FlipAt > 0 && i >= 0 && i < int64(len(b)) {
		b = append([]byte(nil), b...)
		b[i] ^= 1
	}
	end := max(s.f.CutAfter, s.f.StallAfter)
	if end > 0 {
		b = b[:min(int64(len(b)), end-s.sent)]
	}
	for len(b) > 0 {
		piece := b
		if s.f.Chunk > 0 {
			piece = b[:min(len(b), s.f.Chunk)]
		}
		n, err := s.ResponseWriter.Write(piece)
		s.sent += int64(n)
		if err != nil {
			return n, err
		}
		_ = http.NewResponseController(s.ResponseWriter).Flush()
		b = b[n:]
	}
	if end > 0 && s.sent >= end {
		if s.f.StallAfter > 0 {
			<-s.r.Context().Done()
		}
		panic(http.ErrAbortHandler)
	}
	return total, nil
}
