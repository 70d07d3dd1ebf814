// Package peeruid finds which user of this host is at the other end of a loopback connection.
package peeruid

import (
	"net"
	"net/netip"
)

// Of returns the user id that created the peer's socket. ok is false if it is not known: the peer
// is on another host or in another network namespace, its socket is closed or half closed, or the
// platform is not Linux. Each call asks the kernel, so cache the result for a connection.
func Of(conn net.Conn) (uid uint32, ok bool) {
	peer, own := address(conn.RemoteAddr()), address(conn.LocalAddr())
	if !peer.Addr().IsLoopback() {
		return 0, false
	}
	return owner(peer, own)
}

// address returns the address of a TCP socket. An IPv4 address inside of an IPv6 address becomes
// IPv4.
func address(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	at := tcp.AddrPort()
	return netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port())
}
