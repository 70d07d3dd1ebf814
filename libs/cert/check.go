package cert

import (
	"crypto/tls"
	"crypto/x509"
	"time"
)

// Check checks a certificate like its users: the key matches and is private, the chain leads to an
// authority in Files.CA (unchecked if that is ""), and the certificate is valid now. It returns the
// leaf if it can be read. It returns ErrFile, ErrMissing, or ErrExpired.
func Check(files Files, now time.Time) (*x509.Certificate, error) {
	list, err := Read(files.Cert)
	if err != nil {
		return nil, ErrFile.WithMessage("%v", err)
	}
	leaf := list[0]
	if err := private(files.Key); err != nil {
		return leaf, err
	}
	if _, err := tls.LoadX509KeyPair(files.Cert, files.Key); err != nil {
		return leaf, ErrFile.WithMessage("%s is not the key of %s", files.Key, files.Cert)
	}
	if now.After(leaf.NotAfter) {
		return leaf, ErrExpired.WithMessage("it ended at %s", leaf.NotAfter.UTC().Format(time.RFC3339)).Fix("renew it: `rollout certs renew`")
	}
	if now.Before(leaf.NotBefore) {
		return leaf, ErrFile.WithMessage("it begins only at %s", leaf.NotBefore.UTC().Format(time.RFC3339)).Fix("check this host's clock")
	}
	if files.CA == "" {
		return leaf, nil
	}
	authorities, err := Read(files.CA)
	if err != nil {
		return leaf, ErrFile.WithMessage("%v", err)
	}
	o := x509.VerifyOptions{Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}
	for _, c := range authorities {
		o.Roots.AddCert(c)
	}
	for _, c := range list[1:] {
		o.Intermediates.AddCert(c)
	}
	if _, err := leaf.Verify(o); err != nil {
		return leaf, ErrFile.WithMessage("it does not lead to an authority of %s: %v", files.CA, err).
			Fix("name the authority that issued it in ca_file, or issue it again with that one")
	}
	return leaf, nil
}
