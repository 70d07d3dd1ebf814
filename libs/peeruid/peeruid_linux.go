package peeruid

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// established is the state of a connected socket in /proc/net/tcp.
const established = "01"

// owner looks for the socket that is bound to local and connected to remote. A socket without an
// inode is ignored: after its process has closed it, the kernel reports root as its owner.
func owner(local, remote netip.AddrPort) (uid uint32, ok bool) {
	if uid, ok = ask(local, remote); ok {
		return uid, true
	}
	for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		if uid, ok = find(table, local, remote); ok {
			return uid, true
		}
	}
	return 0, false
}

func find(table string, local, remote netip.AddrPort) (uint32, bool) {
	f, err := os.Open(table)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode ...
		field := strings.Fields(lines.Text())
		if len(field) < 10 || field[3] != established || field[9] == "0" {
			continue
		}
		if parse(field[1]) != local || parse(field[2]) != remote {
			continue
		}
		uid, err := strconv.ParseUint(field[7], 10, 32)
		return uint32(uid), err == nil
	}
	return 0, false
}

// parse reads an address of the table: 32-bit words in the byte order of the host, then the port.
func parse(text string) netip.AddrPort {
	host, port, _ := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	n, portErr := strconv.ParseUint(port, 16, 16)
	if err != nil || portErr != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}
	}
	for i := 0; i < len(raw); i += 4 {
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	ip, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(ip.Unmap(), uint16(n))
}
