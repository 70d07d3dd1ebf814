// Package blob is the port to byte storage: whole, immutable objects under slash-separated keys.
//
// The adapters are the folders files, s3 and gcs, and pass the suite in blobtest. CAS builds
// content addressing on any of them.
package blob

import (
	"context"
	"io"
	"iter"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors of every adapter, compared with errors.Is.
var (
	ErrNotFound = rpcerr.New(codes.NotFound, "BLOB_NOT_FOUND", "no such blob")
	ErrExists   = rpcerr.New(codes.AlreadyExists, "BLOB_EXISTS", "the blob exists already")
	ErrBadKey   = rpcerr.New(codes.InvalidArgument, "BLOB_BAD_KEY",
		"blob keys are slash-separated names; no name is empty or begins with a dot")
	ErrBadRange = rpcerr.New(codes.OutOfRange, "BLOB_BAD_RANGE", "the range is outside the blob")
	ErrCorrupt  = rpcerr.New(codes.DataLoss, "BLOB_CORRUPT", "the blob's bytes do not have its content id or checksum")
	// Errors that only stores behind a network return.
	ErrNoBucket = rpcerr.New(codes.FailedPrecondition, "BLOB_NO_BUCKET",
		"the bucket is not there; make it first, or fix blob.url and blob.region")
	ErrDenied = rpcerr.New(codes.PermissionDenied, "BLOB_DENIED",
		"the object store refused the credentials; they need to read, create, list and delete objects of the bucket")
	ErrTooLarge = rpcerr.New(codes.ResourceExhausted, "BLOB_TOO_LARGE",
		"the object store takes no blob of that size from a stream; put it from a file")
	ErrUnavailable = rpcerr.New(codes.Unavailable, "BLOB_UNAVAILABLE", "the object store does not answer").RetryAfter(time.Second)
)

// Info describes a blob.
type Info struct {
	Key      string
	Size     int64 // bytes
	Modified time.Time
}

// Range is a part of a blob. The zero Range is all of it.
type Range struct {
	Offset int64 // bytes from the beginning; at most the size
	Length int64 // bytes; 0 means to the end, and more than there is means to the end
}

// Reader reads blobs. Its methods may be called from many goroutines.
type Reader interface {
	// Get opens a range of a blob; the caller closes it. If the store has a checksum of the blob, the
	// last Read of a whole blob returns ErrCorrupt instead of io.EOF if the bytes do not match it. Get
	// returns ErrNotFound or ErrBadRange.
	Get(ctx context.Context, key string, r Range) (io.ReadCloser, error)
	// Stat describes a blob without reading it. ErrNotFound.
	Stat(ctx context.Context, key string) (Info, error)
	// List yields the blobs whose keys start with prefix (a string prefix, not a folder), sorted by
	// key. It ends after its first error.
	List(ctx context.Context, prefix string) iter.Seq2[Info, error]
}

// Writer writes blobs. Its methods may be called from many goroutines.
type Writer interface {
	// Put creates a blob from r. When it returns nil, the bytes are durable and visible. A key can be
	// written once: Put returns ErrExists if the key exists, and exactly one of several concurrent
	// writers succeeds. After an error nothing is visible. But after ErrUnavailable, or if ctx ended
	// while a store behind a network was answering, the complete blob may exist.
	Put(ctx context.Context, key string, r io.Reader) (Info, error)
	// Delete removes a blob. It succeeds if the blob does not exist.
	Delete(ctx context.Context, key string) error
}

// Store is a whole blob store.
type Store interface {
	Reader
	Writer
}

// FilePutter is a Store that can take over a local file without copying it.
type FilePutter interface {
	// PutFile is Put of a local file. The file stays; it may share its storage with the blob from now
	// on and must not be written to again (removing it is fine).
	PutFile(ctx context.Context, key, path string) (Info, error)
}

// CheckKey returns ErrBadKey unless key may name a blob on every adapter.
func CheckKey(key string) error {
	for name := range strings.SplitSeq(key, "/") {
		if name == "" || name[0] == '.' || strings.ContainsAny(name, "\x00\\") || len(name) > 255 {
			return ErrBadKey.With("key", key)
		}
	}
	return nil
}
