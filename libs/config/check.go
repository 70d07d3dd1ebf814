package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
)

// finish makes paths absolute, fills in what follows from other keys, and reports everything that is wrong at once.
func (c Config) finish() (Config, error) {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, p := range []*string{&c.StateDir, &c.SharedDir, &c.Join, &c.TokenFile, &c.Gateway.APIKeysFile, &c.NATS.TokenFile, &c.NATS.PasswordFile, &c.NATS.NKeyFile,
		&c.NATS.CAFile, &c.NATS.CertFile, &c.NATS.KeyFile, &c.Consul.TokenFile, &c.Consul.CAFile, &c.Blob.SecretKeyFile, &c.Blob.CredentialsFile,
		&c.Database.URLFile, &c.TLS.CertFile, &c.TLS.KeyFile, &c.TLS.CAFile} {
		if *p == "" {
			continue
		}
		abs, err := filepath.Abs(*p)
		if err != nil {
			fail("path %q: %w", *p, err)
		}
		*p = abs
	}
	if c.SharedDir == "" {
		c.SharedDir = c.StateDir
	}
	for name, address := range map[string]string{"listen": c.Listen, "gateway.listen": c.Gateway.Listen, "nats.listen": c.NATS.Listen, "consul.listen": c.Consul.Listen} {
		if _, _, err := net.SplitHostPort(address); err != nil {
			fail("%s: %q is no host:port: %w", name, address, err)
		}
	}
	// The token must not cross a network in plain text unless somebody says that the network is private.
	if !c.Insecure && c.TLS.CertFile == "" && !loopback(c.Listen) {
		fail("listen: %s is not loopback: set tls.cert_file and tls.key_file, or insecure_listen where the network is private", c.Listen)
	}
	for name, address := range map[string]string{"nats.listen": c.NATS.Listen, "consul.listen": c.Consul.Listen} {
		if !c.Insecure && !loopback(address) {
			fail("%s: %s is not loopback and has no TLS: set insecure_listen where the network is private, or use a server of its own", name, address)
		}
	}
	if !c.Insecure && c.Gateway.APIKeysFile == "" && !loopback(c.Gateway.Listen) {
		fail("gateway.listen: %s is not loopback: set gateway.api_keys_file, or insecure_listen where the network is private", c.Gateway.Listen)
	}
	if (c.TLS.CertFile == "") != (c.TLS.KeyFile == "") {
		fail("tls: cert_file and key_file go together")
	}
	errs = append(errs, c.NATS.check()...)
	errs = append(errs, c.Consul.check()...)
	errs = append(errs, c.Blob.check()...)
	errs = append(errs, c.Database.check()...)
	if !slices.Contains([]string{"text", "json"}, c.Log.Format) {
		fail("log.format: %q is neither text nor json", c.Log.Format)
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.Log.Level) {
		fail("log.level: %q is none of debug, info, warn, error", c.Log.Level)
	}
	if c.Drain <= 0 {
		fail("drain: %v is no positive duration", c.Drain)
	}
	if len(c.Target) == 0 {
		fail("target: name at least one, or all")
	}
	if c.Join == c.StateDir {
		fail("join: is this process's own state folder; give each process its own")
	}
	if c.Worker.Cores < 0 {
		fail("worker.cores: %d is below 0", c.Worker.Cores)
	}
	return c, errors.Join(errs...)
}

// loopback reports whether the host of host:port is this machine's own.
func loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return true // reported already
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}
