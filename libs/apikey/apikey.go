// Package apikey is the keys with which people and their programs call a control plane. A key is
// 256 random bits, shown once; a file keeps its hash, name and scope (Keep), and every process that
// is called reads that file again when it has changed (Ring).
package apikey

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/atomicfile"
	"github.com/rollout-rl/rollout/libs/rpcerr"
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
	Admin   Scope = "admin"   // delete, and change other users' objects
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
	ErrExists  = rpcerr.New(codes.AlreadyExists, "API_KEY_EXISTS", "there is a key of that name")
	ErrMissing = rpcerr.New(codes.NotFound, "API_KEY_MISSING", "no key has that name")
	ErrLimit   = rpcerr.New(codes.InvalidArgument, "API_KEY_LIMIT", "a limit per minute is a positive number, and the expiry of a key is in the future")
	ErrExpired = rpcerr.New(codes.Unauthenticated, "API_KEY_EXPIRED", "the API key has expired")
	ErrFile    = rpcerr.New(codes.FailedPrecondition, "API_KEY_FILE", "the file of API keys can't be used")
)

const prefix = "rk-" // marks a key, so that scanners of repositories recognize it

var name = regexp.MustCompile(`^[a-z0-9]([a-z0-9.@_-]{0,62}[a-z0-9])?$`)

// Record is one entry of the file of API keys: rollout.key.v1.ApiKey in its JSON form.
type Record struct {
	Name    string    `json:"name"`
	Scope   Scope     `json:"scope"`
	Hash    string    `json:"sha256"` // of the key; it is random, so nothing slower is needed
	Created time.Time `json:"created"`
	Project string    `json:"project,omitempty"` // whose runs the key may use; empty: the default project
	Limits
}

// Limits restrict the use of a key.
type Limits struct {
	Expires *time.Time `json:"expires,omitempty"` // nil: never
	// RequestsPerMinute and TokensPerMinute are the completions of policies that the key may request,
	// and the tokens of prompts and completions. 0: any number. Each gateway process counts alone.
	RequestsPerMinute int `json:"requestsPerMinute,omitempty"`
	TokensPerMinute   int `json:"tokensPerMinute,omitempty"`
}

// Keep is a file of keys. Changes are made under a lock file in the same folder.
type Keep struct{ Path string }

// List returns the existing keys; none if the file does not exist. It returns ErrFile.
func (k Keep) List() ([]Record, error) {
	data, err := os.ReadFile(k.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var list []Record
	if err == nil {
		err = json.Unmarshal(data, &list)
	}
	if err != nil {
		return nil, ErrFile.WithMessage("the file of API keys %s can't be read: %v", k.Path, err)
	}
	if info, err := os.Stat(k.Path); err == nil && info.Mode().Perm()&0o022 != 0 {
		return nil, ErrFile.WithMessage("others may write %s, and with it give themselves keys", k.Path).Fix("chmod 600 " + k.Path)
	}
	return list, nil
}

// Create makes a key and keeps its hash. The key cannot be shown again. ErrName, ErrScope,
// ErrLimit, ErrExists.
func (k Keep) Create(who string, scope Scope, limits Limits, now time.Time) (key string, err error) {
	if !name.MatchString(who) {
		return "", ErrName
	}
	if !slices.Contains(Scopes(), scope) {
		return "", ErrScope
	}
	if limits.RequestsPerMinute < 0 || limits.TokensPerMinute < 0 || limits.Expires != nil && !limits.Expires.After(now) {
		return "", ErrLimit
	}
	if limits.Expires != nil {
		expires := limits.Expires.UTC().Truncate(time.Second)
		limits.Expires = &expires
	}
	key = prefix + strings.ToLower(rand.Text()+rand.Text())
	return key, k.change(func(list []Record) ([]Record, error) {
		if slices.ContainsFunc(list, func(r Record) bool { return r.Name == who }) {
			return nil, ErrExists.WithMessage("there is a key of the name %s", who).Fix("revoke it first, or choose another name")
		}
		sum := sha256.Sum256([]byte(key))
		return append(list, Record{Name: who, Scope: scope, Hash: hex.EncodeToString(sum[:]), Created: now.UTC().Truncate(time.Second), Limits: limits}), nil
	})
}

// Revoke removes a key; the next call with it is refused. ErrMissing.
func (k Keep) Revoke(who string) error {
	return k.change(func(list []Record) ([]Record, error) {
		rest := slices.DeleteFunc(slices.Clone(list), func(r Record) bool { return r.Name == who })
		if len(rest) == len(list) {
			return nil, ErrMissing.WithMessage("no key is named %s", who).Fix("`rollout keys list` shows them")
		}
		return rest, nil
	})
}

func (k Keep) change(by func([]Record) ([]Record, error)) error {
	if err := os.MkdirAll(filepath.Dir(k.Path), 0o700); err != nil {
		return fmt.Errorf("make the folder of API keys: %w", err)
	}
	lock, err := os.OpenFile(k.Path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("lock the API keys: %w", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock the API keys: %w", err)
	}
	list, err := k.List()
	if err == nil {
		list, err = by(list)
	}
	if err != nil {
		return err
	}
	data, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return err
	}
	if err := atomicfile.Write(k.Path, append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write the API keys: %w", err)
	}
	return nil
}

// Ring is the keys of a file as a process checks them. Its methods may be called from many
// goroutines.
type Ring struct {
	keep Keep
	now  func() time.Time

	mu    sync.Mutex
	seen  os.FileInfo // of the file that was read last; nil: none
	list  []Record
	fails error
}

// Open makes a Ring; the file need not be there yet.
func Open(path string) *Ring { return &Ring{keep: Keep{path}, now: time.Now} }

// Find returns the owner of a key. All keys are compared, each in constant time. If the file can no
// longer be read, every key is refused. ErrFile, ErrExpired.
func (r *Ring) Find(key string) (found Record, ok bool, err error) {
	list, err := r.current()
	sum := sha256.Sum256([]byte(key))
	digest := []byte(hex.EncodeToString(sum[:]))
	for _, k := range list {
		if subtle.ConstantTimeCompare(digest, []byte(k.Hash)) == 1 {
			found, ok = k, true
		}
	}
	if ok && err == nil && found.Expires != nil && !found.Expires.After(r.now()) {
		return Record{}, false, ErrExpired.WithMessage("the API key %s expired at %s", found.Name, found.Expires.Format(time.RFC3339)).
			Fix("ask for a new key (`rollout keys create`)")
	}
	return found, ok && err == nil, err
}

func (r *Ring) current() ([]Record, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	info, err := os.Stat(r.keep.Path)
	if err != nil {
		r.seen, r.list, r.fails = nil, nil, nil
		if !errors.Is(err, fs.ErrNotExist) {
			r.fails = ErrFile.Wrap(err)
		}
		return r.list, r.fails
	}
	if r.seen != nil && os.SameFile(r.seen, info) && r.seen.ModTime().Equal(info.ModTime()) && r.seen.Size() == info.Size() && r.seen.Mode() == info.Mode() {
		return r.list, r.fails
	}
	r.seen = info
	r.list, r.fails = r.keep.List()
	return r.list, r.fails
}
