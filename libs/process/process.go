// Package process finds what the kernel of this host knows of other processes: who listens at an
// address, and who is stopped. On other systems than Linux nothing is found.
package process

import (
	"net"
	"net/netip"
)

// Process is a process of this host.
type Process struct {
	PID     int
	Command string // its name, as `ps -o comm` shows it
	Stopped bool   // by a signal or a debugger
	UID     int    // its real user; -1 if it has just exited
}

// local reports the IP address and port of an address, if it is one of this host.
func local(address string) (netip.AddrPort, bool) {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		resolved, err := net.ResolveTCPAddr("tcp", address)
		if err != nil {
			return netip.AddrPort{}, false
		}
		at = resolved.AddrPort()
	}
	at = netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	if at.Addr().IsLoopback() {
		return at, true
	}
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return at, false
	}
	for _, i := range interfaces {
		if prefix, err := netip.ParsePrefix(i.String()); err == nil && prefix.Addr().Unmap() == at.Addr() {
			return at, true
		}
	}
	return at, false
}
