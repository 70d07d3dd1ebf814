// Package credential makes and checks the credentials of workers. A credential names a run, a role,
// and an incarnation, and permits only the calls of that role for that run, until it expires or the
// incarnation has ended. It is signed with the mesh token, which workers never get.
package credential

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
	"time"
)

// Peer is the role of the token that all workers of an incarnation accept: services and other
// workers of the run call them with it. Services accept it for nothing. It does not expire, because
// it ends with the processes that accept it.
const Peer = "peer"

const (
	// Lifetime is how long a new credential is in force. The scheduler renews it at half of that.
	Lifetime = time.Hour
	// Skew is by how much the clock of a service may be ahead of the scheduler's.
	Skew = 5 * time.Minute

	prefix = "rw-" // marks a credential, so that scanners of repositories recognize it
	domain = "rollout.worker-credential.v2\n"
)

// Claims is what a credential says.
type Claims struct {
	Run         string // run, or served model
	Role        string // kind of the worker, or Peer
	Incarnation uint32 // of the run
	Expires     int64  // Unix time in seconds; 0: never
}

// String is the text of the claims without a signature: RUN.ROLE.INCARNATION.EXPIRES.
func (c Claims) String() string {
	return strings.Join([]string{c.Run, c.Role, strconv.FormatUint(uint64(c.Incarnation), 10), strconv.FormatInt(c.Expires, 10)}, ".")
}

// Parse is the inverse of Claims.String.
func Parse(text string) (c Claims, ok bool) {
	parts := strings.Split(text, ".")
	if len(parts) != 4 || parts[0] == "" {
		return Claims{}, false
	}
	incarnation, err := strconv.ParseUint(parts[2], 10, 32)
	if err != nil {
		return Claims{}, false
	}
	expires, err := strconv.ParseInt(parts[3], 10, 64)
	c = Claims{Run: parts[0], Role: parts[1], Incarnation: uint32(incarnation), Expires: expires}
	return c, err == nil && c.String() == text // one text for each credential
}

// For returns the claims of a credential that is made now. A token for peers has no end.
func For(run, role string, incarnation uint32, now time.Time) Claims {
	c := Claims{Run: run, Role: role, Incarnation: incarnation}
	if role != Peer {
		c.Expires = now.Add(Lifetime).Unix()
	}
	return c
}

// Due reports whether a credential should be renewed: half of its lifetime is over.
func (c Claims) Due(now time.Time) bool {
	return c.Expires != 0 && !now.Before(time.Unix(c.Expires, 0).Add(-Lifetime/2))
}

// Issue returns the credential
//
//	rw-RUN.ROLE.INCARNATION.EXPIRES.hex(HMAC-SHA256(mesh token, "rollout.worker-credential.v2\n" RUN.ROLE.INCARNATION.EXPIRES))
func Issue(meshToken string, c Claims) string {
	return prefix + c.String() + "." + sign(meshToken, c)
}

func sign(meshToken string, c Claims) string {
	h := hmac.New(sha256.New, []byte(meshToken))
	h.Write([]byte(domain + c.String()))
	return hex.EncodeToString(h.Sum(nil))
}

// Verify returns the claims of a credential; false if it was not issued with the mesh token. It
// may have expired.
func Verify(meshToken, text string) (Claims, bool) {
	rest, ok := strings.CutPrefix(text, prefix)
	end := strings.LastIndexByte(rest, '.')
	if !ok || end < 0 || meshToken == "" {
		return Claims{}, false
	}
	c, ok := Parse(rest[:end])
	return c, ok && (c.Expires != 0 || c.Role == Peer) && hmac.Equal([]byte(rest[end+1:]), []byte(sign(meshToken, c)))
}
