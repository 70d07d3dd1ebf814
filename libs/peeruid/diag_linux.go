package peeruid

import (
	"encoding/binary"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Sizes and offsets of inet_diag.h.
const (
	headerBytes  = unix.SizeofNlMsghdr
	requestBytes = headerBytes + 8 + 48
	idAt         = 8 // in a request; its socket id has 48 bytes
	stateAt      = 1 // in an answer
	uidAt        = 4 + 48 + 12
	inodeAt      = uidAt + 4
	answerBytes  = inodeAt + 4

	byFamily = 20 // SOCK_DIAG_BY_FAMILY
)

// ask asks the kernel for one socket, by netlink. A table of all sockets takes it milliseconds. ok
// is false if it finds none that is connected, or has no such interface.
func ask(local, remote netip.AddrPort) (uid uint32, ok bool) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(int64(time.Second)) // it answers at once, or never
	if unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit) != nil ||
		unix.Sendto(fd, request(local, remote), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) != nil {
		return 0, false
	}
	raw := make([]byte, 512)
	n, from, err := unix.Recvfrom(fd, raw, 0)
	kernel, isNetlink := from.(*unix.SockaddrNetlink)
	if err != nil || !isNetlink || kernel.Pid != 0 || n < headerBytes+answerBytes || binary.NativeEndian.Uint16(raw[4:]) != byFamily {
		return 0, false
	}
	answer := raw[headerBytes:n]
	if answer[stateAt] != unix.BPF_TCP_ESTABLISHED || binary.NativeEndian.Uint32(answer[inodeAt:]) == 0 {
		return 0, false
	}
	return binary.NativeEndian.Uint32(answer[uidAt:]), true
}

// request is the message that asks for the socket that is bound to local and connected to remote.
func request(local, remote netip.AddrPort) []byte {
	raw := make([]byte, requestBytes)
	binary.NativeEndian.PutUint32(raw, requestBytes)
	binary.NativeEndian.PutUint16(raw[4:], byFamily)
	binary.NativeEndian.PutUint16(raw[6:], unix.NLM_F_REQUEST)
	body := raw[headerBytes:]
	body[0], body[1] = unix.AF_INET, unix.IPPROTO_TCP
	if local.Addr().Is6() {
		body[0] = unix.AF_INET6
	}
	binary.NativeEndian.PutUint32(body[4:], 1<<unix.BPF_TCP_ESTABLISHED)
	id := body[idAt:]
	binary.BigEndian.PutUint16(id, local.Port())
	binary.BigEndian.PutUint16(id[2:], remote.Port())
	copy(id[4:], local.Addr().AsSlice())
	copy(id[20:], remote.Addr().AsSlice())
	binary.NativeEndian.PutUint64(id[40:], ^uint64(0)) // any cookie
	return raw
}
