// Package worker has the code that services share for worker processes: how a registration proves
// which process it belongs to.
package worker

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"strconv"

	"github.com/rollout-rl/rollout/libs/discovery"
)

// Keys of a registration's metadata.
const (
	MetaRun         = "run"
	MetaReserved    = "reserved" // "true": for evaluations (eval.workers)
	MetaWorker      = "worker"
	MetaIncarnation = "incarnation"
	MetaRank        = "rank"
	MetaProof       = "proof"
	MetaPID         = "pid" // for people; no code depends on it
)

// NewNonce returns the secret of one launch. The scheduler writes it into the worker's spec; it is
// never logged or registered.
func NewNonce() string { return rand.Text() }

// Proof is the keyed hash by which a registration shows that its process was launched with a nonce:
//
//	hex(HMAC-SHA256(nonce, "rollout.worker.v1\n" worker "\n" rank "\n" address))
//
// A process group (torchrun) shares the nonce of its launch, so the rank is hashed too. The address
// is hashed so that a copied proof is not valid for another address.
func Proof(nonce, worker string, rank int, address string) string {
	h := hmac.New(sha256.New, []byte(nonce))
	h.Write([]byte("rollout.worker.v1\n" + worker + "\n" + strconv.Itoa(rank) + "\n" + address))
	return hex.EncodeToString(h.Sum(nil))
}

// Registration has the claims of a worker in the registry.
type Registration struct {
	Worker  string
	Rank    int
	Address string // host:port
	Proof   string
}

// RegistrationOf reads the claim of a registered instance. An unreadable rank is -1, for which no
// proof is valid.
func RegistrationOf(in discovery.Instance) Registration {
	rank, err := strconv.Atoi(in.Meta[MetaRank])
	if err != nil {
		rank = -1
	}
	return Registration{Worker: in.Meta[MetaWorker], Rank: rank, Address: in.Address, Proof: in.Meta[MetaProof]}
}

// IncarnationOf returns the incarnation of a registered worker; 0 if it can't be read.
func IncarnationOf(in discovery.Instance) uint32 {
	incarnation, _ := strconv.ParseUint(in.Meta[MetaIncarnation], 10, 32) // 0 after an error
	return uint32(incarnation)
}

// Valid reports whether the process that registered was launched with the nonce. An empty nonce
// belongs to no launch.
func (r Registration) Valid(nonce string) bool {
	return nonce != "" && r.Rank >= 0 && hmac.Equal([]byte(r.Proof), []byte(Proof(nonce, r.Worker, r.Rank, r.Address)))
}
