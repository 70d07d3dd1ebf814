package process

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// listening is the state LISTEN in /proc/net/tcp.
const listening = "0A"

// Listener finds the process that listens at an address of this host. It finds only those whose
// files the caller may see: its own, or all as root.
func Listener(address string) (Process, bool) {
	at, here := local(address)
	if !here {
		return Process{}, false
	}
	socket := ""
	for _, table := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		if socket = listener(table, at); socket != "" {
			break
		}
	}
	if socket == "" {
		return Process{}, false
	}
	var found Process
	each(func(pid int) bool {
		has := false
		files(pid, func(link string) bool {
			has = link == "socket:["+socket+"]"
			return !has
		})
		if has {
			found = read(pid)
		}
		return !has
	})
	return found, found.PID != 0
}

// listener is the inode of the socket of a table that listens at an address, or at every address.
func listener(table string, at netip.AddrPort) string {
	file, err := os.Open(table)
	if err != nil {
		return ""
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[3] != listening {
			continue
		}
		found, ok := parse(fields[1])
		if ok && found.Port() == at.Port() && (found.Addr() == at.Addr() || found.Addr().IsUnspecified()) {
			return fields[9]
		}
	}
	return ""
}

// parse reads an address of /proc/net/tcp: words of the host's order in hexadecimal digits.
func parse(text string) (netip.AddrPort, bool) {
	host, port, found := strings.Cut(text, ":")
	digits, err := hex.DecodeString(host)
	if !found || err != nil || len(digits)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(digits); i += 4 {
		binary.BigEndian.PutUint32(digits[i:], binary.NativeEndian.Uint32(digits[i:]))
	}
	ip, valid := netip.AddrFromSlice(digits)
	number, err := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(ip.Unmap(), uint16(number)), valid && err == nil
}

// Holder is a process that has a file open.
type Holder struct {
	Process
	Path string
}

// Holding lists the processes of a name that have a file of this name open, with its path.
func Holding(command, file string) (out []Holder) {
	each(func(pid int) bool {
		p := read(pid)
		if p.Command != command {
			return true
		}
		files(pid, func(link string) bool {
			if filepath.Base(link) != file {
				return true
			}
			out = append(out, Holder{Process: p, Path: link})
			return false
		})
		return true
	})
	return out
}

// Locking finds another process that has a lock for writing on a file. Its command is the whole
// line. API: https://man7.org/linux/man-pages/man5/proc_locks.5.html
func Locking(path string) (Process, bool) {
	info, err := os.Stat(path)
	if err != nil {
		return Process{}, false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return Process{}, false
	}
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev), stat.Ino)
	text, _ := os.ReadFile("/proc/locks")
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line) // those that wait have "->" in place of the type
		if len(fields) < 6 || fields[1] == "->" || fields[3] != "WRITE" || fields[5] != file {
			continue
		}
		pid, err := strconv.Atoi(fields[4])
		if err != nil || pid <= 0 || pid == os.Getpid() { // 0: of another PID namespace
			continue
		}
		if p := read(pid); p.PID != 0 {
			if command, err := os.ReadFile("/proc/" + fields[4] + "/cmdline"); err == nil && len(command) > 0 {
				p.Command = strings.TrimSpace(strings.ReplaceAll(string(command), "\x00", " "))
			}
			return p, true
		}
	}
	return Process{}, false
}

// each calls visit with every process until it returns false.
func each(visit func(pid int) bool) {
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil && !visit(pid) {
			return
		}
	}
}

// files calls visit with every open file of a process until it returns false.
func files(pid int, visit func(link string) bool) {
	folder := "/proc/" + strconv.Itoa(pid) + "/fd"
	entries, _ := os.ReadDir(folder)
	for _, entry := range entries {
		if link, err := os.Readlink(folder + "/" + entry.Name()); err == nil && !visit(link) {
			return
		}
	}
}

// read reads a process; zero if it has just exited.
func read(pid int) Process {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return Process{}
	}
	begin, end := strings.IndexByte(string(text), '('), strings.LastIndexByte(string(text), ')')
	if begin < 0 || end < begin {
		return Process{}
	}
	state := strings.TrimSpace(string(text[end+1:]))
	return Process{PID: pid, Command: string(text[begin+1 : end]), Stopped: strings.HasPrefix(state, "T") || strings.HasPrefix(state, "t"), UID: user(pid)}
}

// user is the real user of a process. The owner of its folder in /proc does not tell: a process can
// make that root.
func user(pid int) int {
	text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	for line := range strings.Lines(string(text)) {
		if ids, found := strings.CutPrefix(line, "Uid:"); found {
			if uid, err := strconv.Atoi(strings.Fields(ids)[0]); err == nil {
				return uid
			}
		}
	}
	return -1
}
