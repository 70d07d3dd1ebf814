package edge

import (
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
)

// local refuses a request over loopback that names another host, or that a page of another origin
// sent: a page in a browser reaches loopback by a name that it resolves to 127.0.0.1 (DNS
// rebinding). Requests with a valid key are not checked, because such a page has none.
func local(r *http.Request) error {
	own, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if own == nil {
		return nil
	}
	at, err := netip.ParseAddrPort(own.String())
	if err != nil || !at.Addr().Unmap().IsLoopback() {
		return nil
	}
	if !loopbackName(r.Host) {
		return &Error{
			Status: http.StatusForbidden, Code: "host_not_allowed", Message: "the request names the host " + r.Host + ", but it arrived over loopback",
			Fix: "use localhost or 127.0.0.1 in the URL, or send an API key",
		}
	}
	origin := r.Header.Get("Origin")
	if origin == "" {
		return nil
	}
	if from, err := url.Parse(origin); err != nil || !loopbackName(from.Host) {
		return &Error{
			Status: http.StatusForbidden, Code: "origin_not_allowed", Message: "a page of the origin " + origin + " must not use this endpoint",
			Fix: "call it from a page on localhost, or send an API key",
		}
	}
	return nil
}

// loopbackName reports whether a host with an optional port is this host's loopback.
func loopbackName(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}
