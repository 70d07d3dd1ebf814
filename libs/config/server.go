package config

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// check reports what is wrong with the keys. It never repeats an URL that holds a secret.
func (n NATS) check() (errs []error) {
	for text := range strings.SplitSeq(n.URL, ",") {
		if n.URL == "" {
			break
		}
		u, err := url.Parse(strings.TrimSpace(text))
		switch {
		case err != nil && strings.Contains(text, "@"):
			errs = append(errs, errors.New("nats.url: not a NATS URL; write nats://host:4222, without credentials"))
		case err == nil && u.User != nil:
			errs = append(errs, errors.New("nats.url: no credentials in an URL; set nats.token, or nats.user and nats.password, to a reference: \"file:PATH\" or \"env:NAME\""))
		case err != nil || u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme):
			errs = append(errs, fmt.Errorf("nats.url: %q is not a NATS URL; write nats://host:4222", text))
		}
	}
	errs = append(errs, alternatives("nats", map[string]string{
		"token": n.Token.String(), "user": n.User, "nkey": n.NKey.String(),
	}))
	if (n.User == "") != (n.Password == Ref{}) {
		errs = append(errs, errors.New("nats: user and password go together"))
	}
	if (n.CertFile == "") != (n.KeyFile == "") {
		errs = append(errs, errors.New("nats: cert_file and key_file go together"))
	}
	if n.Replicas < 0 || n.Replicas > 5 {
		errs = append(errs, fmt.Errorf("nats.replicas: %d is not within 0 and 5", n.Replicas))
	}
	return present(errs)
}

func (c Consul) check() (errs []error) {
	scheme, rest, found := strings.Cut(c.Address, "://")
	switch {
	case found && scheme != "http" && scheme != "https":
		errs = append(errs, fmt.Errorf("consul.address: %q begins with neither http:// nor https://", c.Address))
	case strings.Contains(rest, "@") || strings.Contains(c.Address, "@"):
		errs = append(errs, errors.New("consul.address: no credentials in an address; set consul.token to a reference: \"file:PATH\" or \"env:NAME\""))
	case c.CAFile+c.CertFile != "" && scheme != "https":
		errs = append(errs, errors.New("consul: ca_file, cert_file and key_file are for an agent at https://host:port"))
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		errs = append(errs, errors.New("consul: cert_file and key_file go together"))
	}
	return present(errs)
}

// Bucket returns the parts of URL.
type Bucket struct {
	Kind   string // "s3", "gs"; "" are files in the state folder
	Name   string
	Prefix string
}

// Bucket parses URL, which was checked.
func (b Blob) Bucket() Bucket {
	if b.URL == "" {
		return Bucket{}
	}
	u, err := url.Parse(b.URL)
	if err != nil {
		return Bucket{}
	}
	return Bucket{Kind: u.Scheme, Name: u.Host, Prefix: strings.Trim(u.Path, "/")}
}

func (b Blob) check() (errs []error) {
	if b.URL != "" {
		u, err := url.Parse(b.URL)
		switch {
		case err == nil && u.User != nil:
			errs = append(errs, errors.New("blob.url: no credentials in an URL; set blob.access_key, and blob.secret_key to a reference: \"file:PATH\" or \"env:NAME\""))
		case err != nil || u.Host == "" || u.Scheme != "s3" && u.Scheme != "gs" || u.RawQuery != "":
			errs = append(errs, errors.New("blob.url: not a bucket; write s3://bucket/prefix or gs://bucket/prefix"))
		}
	}
	if (b.AccessKey == "") != (b.SecretKey == Ref{}) {
		errs = append(errs, errors.New("blob: access_key and secret_key go together"))
	}
	if b.Endpoint != "" {
		if u, err := url.Parse(b.Endpoint); err != nil || u.Host == "" || u.User != nil {
			errs = append(errs, errors.New("blob.endpoint: not a URL; write https://host:port, without credentials"))
		} else if ip, err := netip.ParseAddr(u.Hostname()); u.Scheme != "https" && u.Hostname() != "localhost" && (err != nil || !ip.IsLoopback()) {
			errs = append(errs, fmt.Errorf("blob.endpoint: %s is not loopback; use https", u.Host))
		}
	}
	return present(errs)
}

// alternatives refuses more than one of some keys of a table.
func alternatives(table string, values map[string]string) error {
	var set []string
	for name, value := range values {
		if value != "" {
			set = append(set, name)
		}
	}
	slices.Sort(set)
	if len(set) > 1 {
		return fmt.Errorf("%s: %s exclude each other; set one of them", table, strings.Join(set, " and "))
	}
	return nil
}

func present(errs []error) []error {
	return slices.DeleteFunc(errs, func(err error) bool { return err == nil })
}
