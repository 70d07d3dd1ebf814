package cert

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/atomicfile"
)

// Folder is a folder with an authority and the certificates that it issued: ca.pem and ca-key.pem,
// KIND-NAME.pem and KIND-NAME-key.pem. Only the owner can read keys.
type Folder struct {
	Path string
	Now  func() time.Time
}

const (
	authority = "ca"
	// backdate is how long before now a certificate begins: clocks of hosts differ.
	backdate = 5 * time.Minute
)

// CAFile is the certificate of the authority, which everybody of the mesh trusts.
func (f Folder) CAFile() string { return f.cert(authority) }

// CAKeyFile is the authority's key. Anyone who has it can issue certificates. No service needs it.
func (f Folder) CAKeyFile() string { return f.key(authority) }

// CertFile is the certificate of an identity.
func (f Folder) CertFile(id Identity) string { return f.cert(id.String()) }

// KeyFile is its key.
func (f Folder) KeyFile(id Identity) string { return f.key(id.String()) }

func (f Folder) cert(name string) string { return filepath.Join(f.Path, name+".pem") }
func (f Folder) key(name string) string  { return filepath.Join(f.Path, name+"-key.pem") }

// Init makes the authority, good for life. ErrExists.
func (f Folder) Init(commonName string, life time.Duration) (*x509.Certificate, error) {
	if err := os.MkdirAll(f.Path, 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of certificates: %w", err)
	}
	for _, path := range []string{f.CAFile(), f.CAKeyFile()} {
		if _, err := os.Lstat(path); err == nil {
			return nil, ErrExists.WithMessage("%s is there already", path).
				Fix("keep it, or choose another folder: a new authority would invalidate every certificate of this one")
		}
	}
	now := f.Now()
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: commonName}, IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, NotBefore: now.Add(-backdate), NotAfter: now.Add(life),
	}
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	return f.sign(authority, template, template, key, key)
}

// Issue creates a certificate and a key, valid for life and for servers under hosts (names and
// addresses), and replaces existing ones. It returns ErrMissing if the folder has no authority,
// ErrExpired if the authority expires before the certificate would, or ErrName.
func (f Folder) Issue(id Identity, hosts []string, life time.Duration) (*x509.Certificate, error) {
	if err := id.check(); err != nil {
		return nil, err
	}
	ca, caKey, err := f.authority()
	if err != nil {
		return nil, err
	}
	now := f.Now()
	template := &x509.Certificate{
		Subject:   pkix.Name{CommonName: id.Name, OrganizationalUnit: []string{string(id.Kind)}},
		URIs:      []*url.URL{{Scheme: uriScheme, Host: uriHost, Path: "/" + string(id.Kind) + "/" + id.Name}},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true,
	}
	if template.NotAfter.After(ca.NotAfter) {
		return nil, ErrExpired.WithMessage("the authority ends at %s, before the certificate would", ca.NotAfter.UTC().Format(time.RFC3339)).
			Fix("ask for fewer days, or make a new authority")
	}
	if id.Kind != Person {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
		if err := addHosts(template, hosts); err != nil {
			return nil, err
		}
	} else if len(hosts) > 0 {
		return nil, ErrName.WithMessage("a person serves under no host").Fix("leave the hosts out, or issue a certificate for a service")
	}
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	return f.sign(id.String(), template, ca, key, caKey)
}

// Renew issues a new certificate for the same hosts. It returns ErrMissing if there is no
// certificate.
func (f Folder) Renew(id Identity, life time.Duration) (*x509.Certificate, error) {
	old, err := Read(f.CertFile(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrMissing.WithMessage("%s is not there", f.CertFile(id)).Fix("issue it first")
	}
	if err != nil {
		return nil, err
	}
	return f.Issue(id, Hosts(old[0]), life)
}

// Issued is whose certificates are in the folder, by name.
func (f Folder) Issued() ([]Identity, error) {
	entries, err := os.ReadDir(f.Path)
	if err != nil {
		return nil, ErrMissing.WithMessage("the certificate folder %s does not exist", f.Path).Fix("create it: `rollout certs init`")
	}
	var out []Identity
	for _, e := range entries {
		kind, name, ok := strings.Cut(strings.TrimSuffix(e.Name(), ".pem"), "-")
		id := Identity{Kind(kind), name}
		if !ok || !strings.HasSuffix(e.Name(), ".pem") || strings.HasSuffix(e.Name(), "-key.pem") || id.check() != nil {
			continue
		}
		out = append(out, id)
	}
	return out, nil
}

// Hosts returns the names and addresses for which a certificate is valid.
func Hosts(c *x509.Certificate) []string {
	hosts := slices.Clone(c.DNSNames)
	for _, ip := range c.IPAddresses {
		hosts = append(hosts, ip.String())
	}
	return hosts
}

func addHosts(template *x509.Certificate, hosts []string) error {
	if len(hosts) == 0 {
		return ErrName.WithMessage("a certificate of a server needs the hosts that it is called under").Fix("name them with --host")
	}
	for _, host := range hosts {
		if ip, err := netip.ParseAddr(host); err == nil {
			template.IPAddresses = append(template.IPAddresses, net.IP(ip.AsSlice()))
			continue
		}
		if host == "" || strings.ContainsAny(host, ":/ ") {
			return ErrName.WithMessage("%q is neither a host name nor an address", host).Fix("write it without a port: control.internal or 10.0.0.7")
		}
		template.DNSNames = append(template.DNSNames, host)
	}
	return nil
}

func (f Folder) authority() (*x509.Certificate, *ecdsa.PrivateKey, error) {
	list, err := Read(f.CAFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, ErrMissing.WithMessage("%s has no authority", f.Path).Fix("create it: `rollout certs init`")
	}
	if err != nil {
		return nil, nil, err
	}
	if err := private(f.CAKeyFile()); err != nil {
		return nil, nil, err
	}
	data, err := os.ReadFile(f.CAKeyFile())
	if err != nil {
		return nil, nil, ErrMissing.WithMessage("the authority's key %s can't be read: %v", f.CAKeyFile(), err).Fix("issue where the key is")
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, nil, ErrFile.WithMessage("%s holds no key in PEM", f.CAKeyFile())
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, nil, ErrFile.WithMessage("%s holds no key in PKCS #8", f.CAKeyFile())
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	for _, ca := range list { // ca.pem may also contain previous authorities
		if ok && key.PublicKey.Equal(ca.PublicKey) {
			return ca, key, nil
		}
	}
	return nil, nil, ErrFile.WithMessage("%s is not the key of %s", f.CAKeyFile(), f.CAFile())
}

// sign makes a certificate and puts key and certificate in their places: each whole or not at all,
// the key first.
func (f Folder) sign(name string, template, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		return nil, fmt.Errorf("make certificate %s: %w", name, err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("make certificate %s: %w", name, err)
	}
	if err := put(f.key(name), "PRIVATE KEY", raw, 0o600); err != nil {
		return nil, err
	}
	if err := put(f.cert(name), "CERTIFICATE", der, 0o644); err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func put(path, kind string, der []byte, mode os.FileMode) error {
	if err := atomicfile.Write(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func newKey() (*ecdsa.PrivateKey, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }
