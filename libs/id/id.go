// Package id makes the identifiers of the project: ids of runs ("run-<ulid>"), of served models
// ("serve-<ulid>"), and of content ("blake3-<hex>").
package id

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"
	"github.com/zeebo/blake3"
	"google.golang.org/protobuf/proto"
)

const (
	runPrefix     = "run-"
	servingPrefix = "serve-"
	contentPrefix = "blake3-"
	hexLen        = 64 // blake3-256
)

// NewRun makes a run id. Ids sort by the millisecond they were made in. They are lowercase, so that
// they serve as file names, NATS tokens and DNS labels alike.
func NewRun(now time.Time) string { return runPrefix + New(now) }

// NewServing makes the id of a served model, which sorts like a run id.
func NewServing(now time.Time) string { return servingPrefix + New(now) }

// ServedModel reports whether s is the id of a served model.
func ServedModel(s string) bool {
	u, ok := strings.CutPrefix(s, servingPrefix)
	return ok && Valid(u)
}

// New makes a lowercase ULID.
func New(now time.Time) string {
	return strings.ToLower(ulid.MustNew(ulid.Timestamp(now), rand.Reader).String())
}

// At makes the lowercase ULID of a time and of what seed names: the same one whenever both are the
// same.
func At(t time.Time, seed string) string {
	sum := blake3.Sum256([]byte(seed))
	return strings.ToLower(ulid.MustNew(ulid.Timestamp(t), bytes.NewReader(sum[:])).String())
}

// ValidRun reports whether s is a run id. Only such strings may become subjects, file names or
// table keys.
func ValidRun(s string) bool {
	u, ok := strings.CutPrefix(s, runPrefix)
	return ok && Valid(u)
}

// Valid reports whether s has the form of the ids that New creates.
func Valid(s string) bool {
	if s != strings.ToLower(s) {
		return false
	}
	_, err := ulid.ParseStrict(strings.ToUpper(s))
	return err == nil
}

// Content is the content id of data.
func Content(data []byte) string {
	sum := blake3.Sum256(data)
	return contentPrefix + hex.EncodeToString(sum[:])
}

// ContentOf reads r to its end and returns the content id and the size in bytes.
func ContentOf(r io.Reader) (id string, size int64, err error) {
	h := NewHasher()
	size, err = io.Copy(h, r)
	if err != nil {
		return "", size, fmt.Errorf("hash content: %w", err)
	}
	return h.ID(), size, nil
}

// Hasher is an io.Writer that computes the content id of the written bytes.
type Hasher struct{ h *blake3.Hasher }

// NewHasher returns a Hasher of nothing yet.
func NewHasher() *Hasher { return &Hasher{h: blake3.New()} }

func (h *Hasher) Write(p []byte) (int, error) { return h.h.Write(p) }

// ID is the content id of everything written.
func (h *Hasher) ID() string { return contentPrefix + hex.EncodeToString(h.h.Sum(nil)) }

// ValidContent reports whether s is a content id.
func ValidContent(s string) bool {
	h, ok := strings.CutPrefix(s, contentPrefix)
	if !ok || len(h) != hexLen {
		return false
	}
	return strings.Trim(h, "0123456789abcdef") == ""
}

// Message is the content id of m's canonical JSON: the same for equal messages, in every language
// that follows RFC 8785.
func Message(m proto.Message) (string, error) {
	b, err := CanonicalJSON(m)
	if err != nil {
		return "", err
	}
	return Content(b), nil
}
