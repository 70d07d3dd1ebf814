// Package credential makes and checks the credentials of workers. A credential names a run and a
// role, and permits only the calls of that role for that run. It is signed with the mesh token,
// which workers never get.
package credential

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// Peer is the role of the token that all workers of a run accept: services and other workers of the
// run call them with it. Services accept it for nothing.
const Peer = "peer"

const (
	prefix = "rw-" // marks a credential, so that scanners of repositories recognize it
	domain = "rollout.worker-credential.v1\n"
)

// Claims is what a credential says.
type Claims struct {
	Run  string // run, or served model
	Role string // kind of the worker, or Peer
}

// Issue returns the credential
//
//	rw-RUN.ROLE.hex(HMAC-SHA256(mesh token, "rollout.worker-credential.v1\n" RUN "\n" ROLE))
func Issue(meshToken string, c Claims) string {
	return prefix + c.Run + "." + c.Role + "." + sign(meshToken, c)
}

func sign(meshToken string, c Claims) string {
	h := hmac.New(sha256.New, []byte(meshToken))
	h.Write([]byte(domain + c.Run + "\n" + c.Role))
	return hex.EncodeToString(h.Sum(nil))
}

// Verify returns the claims of a credential; false if it was not issued with the mesh token.
func Verify(meshToken, text string) (Claims, bool) {
	rest, ok := strings.CutPrefix(text, prefix)
	parts := strings.Split(rest, ".")
	if !ok || len(parts) != 3 || meshToken == "" {
		return Claims{}, false
	}
	c := Claims{Run: parts[0], Role: parts[1]}
	return c, c.Run != "" && hmac.Equal([]byte(parts[2]), []byte(sign(meshToken, c)))
}
