package discovery

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
)

const (
	// metaSignature is the key of a service's signature in its metadata.
	metaSignature = "signature"
	// workerSuffix ends the names of workers. They prove their launch to the scheduler instead
	// (package worker).
	workerSuffix = "-worker"
)

// Seal signs the registrations of a control plane's services with Ed25519. Its key is derived from
// the mesh token, so all processes have the same one. Anyone who has the public key can verify a
// registration, and no one without the mesh token can make one.
type Seal struct{ key ed25519.PrivateKey }

// NewSeal derives the seal of a control plane from its mesh token.
func NewSeal(token string) *Seal {
	h := hmac.New(sha256.New, []byte(token))
	h.Write([]byte("rollout.registration.v1"))
	return &Seal{ed25519.NewKeyFromSeed(h.Sum(nil))}
}

// Public returns the public key in hexadecimal.
func (s *Seal) Public() string { return hex.EncodeToString(s.key.Public().(ed25519.PublicKey)) }

// Sign returns the metadata of a registration with its signature.
func (s *Seal) Sign(r Service) map[string]string {
	if strings.HasSuffix(r.Name, workerSuffix) {
		return r.Meta
	}
	meta := maps.Clone(r.Meta)
	if meta == nil {
		meta = map[string]string{}
	}
	message := sealed(Instance{Name: r.Name, ID: r.ID, Address: net.JoinHostPort(r.Address, strconv.Itoa(r.Port)), Meta: meta})
	meta[metaSignature] = hex.EncodeToString(ed25519.Sign(s.key, []byte(message)))
	return meta
}

// Authentic reports whether a service of this control plane made a registration.
func (s *Seal) Authentic(i Instance) bool {
	signature, err := hex.DecodeString(i.Meta[metaSignature])
	message := sealed(i)
	return err == nil && message != "" && ed25519.Verify(s.key.Public().(ed25519.PublicKey), []byte(message), signature)
}

// sealed is what a signature covers: everything that a caller uses. One line each for the format,
// name, id, and address, then KEY=VALUE for the metadata without the signature, sorted by key. It
// is "" if a value has a line break, which would make the lines ambiguous.
func sealed(i Instance) string {
	lines := []string{"rollout.service.v1", i.Name, i.ID, i.Address}
	for _, key := range slices.Sorted(maps.Keys(i.Meta)) {
		if key != metaSignature {
			lines = append(lines, key+"="+i.Meta[key])
		}
	}
	message := strings.Join(lines, "\n")
	if strings.Count(message, "\n") != len(lines)-1 {
		return ""
	}
	return message
}

// authentic drops the registrations of services that others made.
func (c *Client) authentic(name string, list []Instance) []Instance {
	if c.seal == nil || strings.HasSuffix(name, workerSuffix) {
		return list
	}
	return slices.DeleteFunc(list, func(i Instance) bool {
		if c.seal.Authentic(i) {
			return false
		}
		if _, known := c.foreign.LoadOrStore(i.ID+" "+i.Address, true); !known {
			c.log.Warn("a registration without a valid signature of this control plane is ignored", "service", name, "id", i.ID, "address", i.Address)
		}
		return true
	})
}
