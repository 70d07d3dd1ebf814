package cert

import (
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Errors of a handshake, see Explain.
var (
	ErrRequired = rpcerr.New(codes.Unauthenticated, "CERT_REQUIRED", "the server requires a certificate, and the client presented none").
			Fix("issue one (`rollout certs issue`) and name it: --cert-file and --key-file of rollout, tls.cert_file and tls.key_file of rolloutd")
	ErrOurs = rpcerr.New(codes.Unauthenticated, "CERT_REFUSED", "the other side does not accept our certificate, or we showed none").
		Fix("show a certificate of the authority that the other side names in tls.ca_file")
	ErrOursEnded = rpcerr.New(codes.Unauthenticated, "CERT_EXPIRED", "our certificate has ended").Fix("renew it: `rollout certs renew`")
	ErrTheirs    = rpcerr.New(codes.Unauthenticated, "CERT_UNTRUSTED", "the certificate of the other side is of no authority that is trusted here").
			Fix("name its authority: --ca-file of rollout, tls.ca_file of rolloutd")
	ErrTheirsEnded = rpcerr.New(codes.Unauthenticated, "CERT_PEER_EXPIRED", "the certificate of the other side has ended, or a clock is wrong").
			Fix("renew it there: `rollout certs renew`; compare the clocks of both hosts")
	ErrHost = rpcerr.New(codes.Unauthenticated, "CERT_HOST", "the certificate of the other side is not for the host that was called").
		Fix("issue it with that host: `rollout certs issue .. --host HOST`, or call the host that it is for")
	ErrPerson = rpcerr.New(codes.Unauthenticated, "CERT_KIND", "a person's certificate was shown to what services and workers alone call").
			Fix("show a service's or a worker's: `rollout certs issue worker NAME`")
	ErrNoTLS = rpcerr.New(codes.Unavailable, "TLS_NOT_SPOKEN", "the other side speaks no TLS").
			Fix("give it a certificate, or call it in plain text where it is on this host")
)

// phrases are the words of crypto/tls and crypto/x509 for failures, including alerts from the other
// side. They must be matched as text, because gRPC returns handshake errors as text.
var phrases = []struct {
	text string
	err  *rpcerr.Error
}{
	{"remote error: tls: certificate required", ErrRequired},
	{"the server requires a certificate", ErrRequired},
	{"remote error: tls: bad certificate", ErrOurs},
	{"remote error: tls: expired certificate", ErrOursEnded},
	{"our certificate has ended", ErrOursEnded},
	{"remote error: tls: unknown certificate authority", ErrOurs},
	{"remote error: tls: unknown certificate", ErrOurs},
	{"certificate signed by unknown authority", ErrTheirs},
	{"certificate has expired or is not yet valid", ErrTheirsEnded},
	{"x509: certificate is valid for", ErrHost},
	{"x509: cannot validate certificate for", ErrHost},
	{"x509: certificate is not valid for any names", ErrHost},
	{"first record does not look like a TLS handshake", ErrNoTLS},
}

// errShowsNone is a client that a server refused, in the server's log.
var errShowsNone = rpcerr.New(codes.Unauthenticated, ErrRequired.Reason(), "it showed no certificate")

// Refusal explains, for the server's log, why a server refused a client or a client refused the
// server.
func Refusal(err error) error {
	switch text := err.Error(); {
	case strings.Contains(text, "client didn't provide a certificate"):
		return errShowsNone
	case strings.Contains(text, "remote error: "):
		return rpcerr.New(codes.Unauthenticated, ErrTheirs.Reason(), "it does not accept our certificate (%s)", text)
	}
	return Explain(err)
}

// Explain converts the error of a failed handshake to one that explains the cause and the fix. It
// returns other errors, and nil, unchanged.
func Explain(err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	for _, p := range phrases {
		if strings.Contains(text, p.text) {
			return p.err.WithMessage("%s (%s)", p.err.Error(), text)
		}
	}
	return err
}
