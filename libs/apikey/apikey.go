// Package apikey checks the keys with which people and their programs call a control plane. A key
// is 256 random bits, shown once. The gateway's database has its hash, name, scope, and limits;
// every process that is called keeps a copy that is at most a second old (Ring).
package apikey

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
)

// Scope says which calls a key may make.
type Scope string

// The scopes. No key has the scopes Any and Mesh. Any is required by calls that every key may make,
// Mesh by those that only the project's own processes may make, with the mesh token.
const (
	Any     Scope = "any"
	Sample  Scope = "sample"  // sample policies
	Session Scope = "session" // sample policies, and end sessions with a reward, which trains on them
	Read    Scope = "read"    // look at everything
	Submit  Scope = "submit"  // plan, start and steer runs, and all of the above
	Admin   Scope = "admin"   // delete, change other users' objects, and manage keys
	Mesh    Scope = "mesh"
)

// allowed is the scopes that a key of a scope has.
var allowed = map[Scope][]Scope{
	Sample:  {Any, Sample},
	Session: {Any, Sample, Session},
	Read:    {Any, Read},
	Submit:  {Any, Sample, Session, Read, Submit},
	Admin:   {Any, Sample, Session, Read, Submit, Admin},
	Mesh:    {Any, Sample, Session, Read, Submit, Admin, Mesh},
}

// Scopes returns the scopes that a key may have.
func Scopes() []Scope { return []Scope{Sample, Session, Read, Submit, Admin} }

// Allows reports whether a key of this scope may make calls that require the scope s.
func (s Scope) Allows(needed Scope) bool { return slices.Contains(allowed[s], needed) }

// Errors, compared with errors.Is.
var (
	ErrScope   = rpcerr.New(codes.InvalidArgument, "API_KEY_SCOPE", "a scope is sample, session, read, submit or admin")
	ErrName    = rpcerr.New(codes.InvalidArgument, "API_KEY_NAME", "a name is at most 64 of a-z, 0-9, and . @ _ - between")
	ErrExists  = rpcerr.New(codes.AlreadyExists, "API_KEY_EXISTS", "there is a key of that name").Fix("revoke it first, or choose another name")
	ErrMissing = rpcerr.New(codes.NotFound, "API_KEY_MISSING", "no key has that name").Fix("`rollout keys list` shows them")
	ErrLimit   = rpcerr.New(codes.InvalidArgument, "API_KEY_LIMIT", "a limit per minute is a positive number, and the expiry of a key is in the future")
	ErrExpired = rpcerr.New(codes.Unauthenticated, "API_KEY_EXPIRED", "the API key has expired")
	ErrFile    = rpcerr.New(codes.FailedPrecondition, "API_KEY_FILE", "the file of API keys can't be used")
	// ErrUnknown means that the keys can't be read, so that no key is accepted.
	ErrUnknown = rpcerr.New(codes.Unavailable, "API_KEYS_UNAVAILABLE", "the API keys can't be read from the gateway").RetryAfter(time.Second)
)

const prefix = "rk-" // marks a key, so that scanners of repositories recognize it

// ValidName reports whether a key may have a name.
func ValidName(s string) bool { return name.MatchString(s) }

var name = regexp.MustCompile(`^[a-z0-9]([a-z0-9.@_-]{0,62}[a-z0-9])?$`)

// Record describes a key.
type Record = keyv1.ApiKey

// New completes the record of a new key with its hash and the time, and returns the key. ErrName,
// ErrScope, ErrLimit.
func New(r *Record, now time.Time) (key string, err error) {
	if !name.MatchString(r.GetName()) {
		return "", ErrName
	}
	if !slices.Contains(Scopes(), Scope(r.GetScope())) {
		return "", ErrScope
	}
	if r.GetProject() != "" && !name.MatchString(r.GetProject()) {
		return "", ErrName.WithMessage("%q is not a name of a project: %s", r.GetProject(), ErrName)
	}
	if r.GetRequestsPerMinute() < 0 || r.GetTokensPerMinute() < 0 || r.GetExpires() != nil && !r.GetExpires().AsTime().After(now) {
		return "", ErrLimit
	}
	key = prefix + strings.ToLower(rand.Text()+rand.Text())
	r.Sha256, r.Created = Hash(key), timestamppb.New(now.UTC().Truncate(time.Second))
	return key, nil
}

// Hash returns the SHA-256 of a key in hexadecimal. A key is random, so nothing slower is needed.
func Hash(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// ReadFile returns the keys of a file, which is a JSON list of records. Earlier versions stored
// keys in one. None without a file. ErrFile.
func ReadFile(path string) ([]*Record, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var list []json.RawMessage
	if err == nil {
		err = json.Unmarshal(data, &list)
	}
	out := make([]*Record, len(list))
	for i, raw := range list {
		out[i] = &Record{}
		if err == nil {
			err = protojson.Unmarshal(raw, out[i])
		}
		if err == nil && (!name.MatchString(out[i].GetName()) || !slices.Contains(Scopes(), Scope(out[i].GetScope())) || len(out[i].GetSha256()) != 2*sha256.Size) {
			err = fmt.Errorf("entry %d has no valid name, scope, and sha256", i)
		}
	}
	if err != nil {
		return nil, ErrFile.WithMessage("the file of API keys %s can't be read: %v", path, err).Fix("correct the file, or remove it and create the keys again")
	}
	if info, err := os.Stat(path); err == nil && info.Mode().Perm()&0o022 != 0 {
		return nil, ErrFile.WithMessage("others may write %s, and with it give themselves keys", path).Fix("chmod 600 " + path)
	}
	return out, nil
}

type recordKey struct{}

// With returns a context of a call with a key.
func With(ctx context.Context, r *Record) context.Context {
	return context.WithValue(ctx, recordKey{}, r)
}

// From returns the key of a call; nil if the call has none, as those with the mesh token.
func From(ctx context.Context) *Record {
	r, _ := ctx.Value(recordKey{}).(*Record)
	return r
}
