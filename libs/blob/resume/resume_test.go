package resume_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
	"testing/iotest"
	"time"

	"github.com/rollout-rl/rollout/libs/blob"
	"github.com/rollout-rl/rollout/libs/blob/resume"
)

var content = bytes.Repeat([]byte("0123456789"), 100)

// read reads content through connections that connect gives: each from a byte on.
func read(t *testing.T, crc uint32, idle time.Duration, connect func(ctx context.Context, from int64) (io.ReadCloser, error)) ([]byte, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	first, err := connect(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := resume.New(t.Context(), resume.Source{
		Key: "k", Length: int64(len(content)), CRC: &crc, Open: connect, Idle: idle,
	}, first, cancel)
	defer r.Close()
	return io.ReadAll(r)
}

func sum(data []byte) uint32 {
	h := resume.NewCRC()
	_, _ = h.Write(data)
	return h.Sum32()
}

// silent gives some bytes and then nothing until its context ends.
type silent struct {
	ctx context.Context
	r   io.Reader
}

func (s silent) Read(p []byte) (int, error) {
	if n, err := s.r.Read(p); n > 0 || !errors.Is(err, io.EOF) {
		return n, err
	}
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

func TestEveryWayToStop(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, broken := range map[string]func(ctx context.Context, part []byte) io.Reader{
		"ends early": func(_ context.Context, part []byte) io.Reader { return bytes.NewReader(part) },
		"breaks": func(_ context.Context, part []byte) io.Reader {
			return io.MultiReader(bytes.NewReader(part), iotest.ErrReader(boom))
		},
		"falls silent": func(ctx context.Context, part []byte) io.Reader { return silent{ctx, bytes.NewReader(part)} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			connections, idle := 0, time.Minute // a pause of the machine does not count as idle
			if name == "falls silent" {
				idle = 500 * time.Millisecond
			}
			got, err := read(t, sum(content), idle, func(ctx context.Context, from int64) (io.ReadCloser, error) {
				connections++
				part := content[from:]
				return io.NopCloser(broken(ctx, part[:min(len(part), 301)])), nil
			})
			if err != nil || !bytes.Equal(got, content) || connections != 4 {
				t.Errorf("%d bytes in %d connections: %v", len(got), connections, err)
			}
		})
	}
}

func TestGivesUp(t *testing.T) {
	t.Parallel()
	connections := 0
	_, err := read(t, 0, time.Minute, func(context.Context, int64) (io.ReadCloser, error) {
		connections++
		return io.NopCloser(bytes.NewReader(nil)), nil
	})
	if !errors.Is(err, blob.ErrUnavailable) || connections != resume.Tries {
		t.Errorf("%v after %d connections", err, connections)
	}
	connections = 0
	_, err = read(t, 0, time.Minute, func(_ context.Context, from int64) (io.ReadCloser, error) {
		if connections++; connections == 2 {
			return nil, blob.ErrNotFound
		}
		return io.NopCloser(bytes.NewReader(content[from : from+3])), nil
	})
	if !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("deleted in the middle: %v", err)
	}
}

func TestChecksumIsOfTheWhole(t *testing.T) {
	t.Parallel()
	whole := func(_ context.Context, from int64) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(content[from:])), nil
	}
	if _, err := read(t, sum(content)+1, time.Minute, whole); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("another checksum: %v", err)
	}
}
