package blob

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// ErrBadID reports that a string is not a content id.
var ErrBadID = rpcerr.New(codes.InvalidArgument, "CONTENT_ID_INVALID", `a content id is "blake3-" and 64 hex digits`)

// CAS is a content-addressed store: the id of a blob is the hash of its bytes, so writing twice is
// writing once.
type CAS struct {
	store Store
	spool string
}

// NewCAS addresses the blobs of store by content, under keys "cas/ab/blake3-ab...". spool is an
// existing local directory where streams of unknown content wait for their id; on the store's own
// file system they then move instead of being copied.
func NewCAS(store Store, spool string) *CAS { return &CAS{store: store, spool: spool} }

// Key is the key that the content has in the underlying store. ErrBadID.
func (c *CAS) Key(content string) (string, error) {
	if !id.ValidContent(content) {
		return "", ErrBadID.With("id", content)
	}
	hex := strings.TrimPrefix(content, "blake3-")
	return "cas/" + hex[:2] + "/" + content, nil
}

// PutBytes stores data and returns its id.
func (c *CAS) PutBytes(ctx context.Context, data []byte) (string, error) {
	content := id.Content(data)
	key, err := c.Key(content)
	if err != nil {
		return "", err
	}
	_, err = c.store.Put(ctx, key, bytes.NewReader(data))
	return content, ignoreExists(err)
}

// PutFile stores a local file. It hashes the file once, and does not copy it if the store can link
// or move it (see FilePutter).
func (c *CAS) PutFile(ctx context.Context, path string) (content string, size int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return "", 0, fmt.Errorf("store file: %w", err)
	}
	defer f.Close()
	if content, size, err = id.ContentOf(f); err != nil {
		return "", 0, fmt.Errorf("store file %s: %w", path, err)
	}
	key, err := c.Key(content)
	if err != nil {
		return "", 0, err
	}
	if fp, ok := c.store.(FilePutter); ok {
		_, err = fp.PutFile(ctx, key, path)
		return content, size, ignoreExists(err)
	}
	if _, err = f.Seek(0, io.SeekStart); err != nil {
		return "", 0, fmt.Errorf("store file %s: %w", path, err)
	}
	_, err = c.store.Put(ctx, key, f)
	return content, size, ignoreExists(err)
}

// Put stores what r gives and returns its id and size in bytes.
func (c *CAS) Put(ctx context.Context, r io.Reader) (content string, size int64, err error) {
	tmp, err := os.CreateTemp(c.spool, "spool-*")
	if err != nil {
		return "", 0, fmt.Errorf("spool content: %w", err)
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	if _, err := io.Copy(tmp, r); err != nil {
		return "", 0, fmt.Errorf("spool content: %w", err)
	}
	if err := tmp.Close(); err != nil {
		return "", 0, fmt.Errorf("spool content: %w", err)
	}
	return c.PutFile(ctx, tmp.Name())
}

// Open reads a content from its start and verifies it while reading: the last Read returns
// ErrCorrupt instead of io.EOF if the bytes do not have the id. Bytes before that are not verified
// yet. Open returns ErrNotFound.
func (c *CAS) Open(ctx context.Context, content string) (io.ReadCloser, error) {
	key, err := c.Key(content)
	if err != nil {
		return nil, err
	}
	rc, err := c.store.Get(ctx, key, Range{})
	if err != nil {
		return nil, err
	}
	return &verifier{ReadCloser: rc, hash: id.NewHasher(), want: content}, nil
}

// Read returns a whole, verified content. ErrNotFound, ErrCorrupt.
func (c *CAS) Read(ctx context.Context, content string) ([]byte, error) {
	rc, err := c.Open(ctx, content)
	if err != nil {
		return nil, err
	}
	defer rc.Close()
	return io.ReadAll(rc)
}

// OpenRange reads a part of a content. A part can't be verified. ErrNotFound, ErrBadRange.
func (c *CAS) OpenRange(ctx context.Context, content string, r Range) (io.ReadCloser, error) {
	key, err := c.Key(content)
	if err != nil {
		return nil, err
	}
	return c.store.Get(ctx, key, r)
}

// Stat describes a content; Info.Key is its id. ErrNotFound.
func (c *CAS) Stat(ctx context.Context, content string) (Info, error) {
	key, err := c.Key(content)
	if err != nil {
		return Info{}, err
	}
	info, err := c.store.Stat(ctx, key)
	info.Key = content
	return info, err
}

// Delete removes a content. The caller must know that nothing refers to it.
func (c *CAS) Delete(ctx context.Context, content string) error {
	key, err := c.Key(content)
	if err != nil {
		return err
	}
	return c.store.Delete(ctx, key)
}

func ignoreExists(err error) error {
	if errors.Is(err, ErrExists) {
		return nil
	}
	return err
}

type verifier struct {
	io.ReadCloser
	hash *id.Hasher
	want string
}

func (v *verifier) Read(p []byte) (int, error) {
	n, err := v.ReadCloser.Read(p)
	v.hash.Write(p[:n])
	if err == io.EOF {
		if got := v.hash.ID(); got != v.want {
			return n, ErrCorrupt.With("id", v.want).With("computed", got)
		}
	}
	return n, err
}
