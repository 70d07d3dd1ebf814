package criu

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rollout-rl/rollout/libs/checkpoint"
)

// descriptor is an open descriptor of a process.
type descriptor struct {
	number, process int
	link            string
	writes          bool
	info            syscall.Stat_t
	mount           int // id of its mount
}

func descriptors(pid int) ([]descriptor, error) {
	entries, err := os.ReadDir(proc(pid, "fd"))
	if err != nil {
		return nil, err
	}
	var found []descriptor
	for _, entry := range entries {
		d := descriptor{process: pid}
		if d.number, err = strconv.Atoi(entry.Name()); err != nil {
			return nil, err
		}
		path := proc(pid, "fd", entry.Name())
		if d.link, err = os.Readlink(path); err != nil {
			continue // it was closed
		}
		if err := syscall.Stat(path, &d.info); err != nil {
			continue
		}
		raw, err := os.ReadFile(proc(pid, "fdinfo", entry.Name()))
		if err != nil {
			continue
		}
		for text := range strings.Lines(string(raw)) {
			name, value, _ := strings.Cut(text, ":")
			switch value = strings.TrimSpace(value); name {
			case "flags":
				flags, _ := strconv.ParseUint(value, 8, 32)
				d.writes = flags&unix.O_ACCMODE != unix.O_RDONLY
			case "mnt_id":
				d.mount, _ = strconv.Atoi(value)
			}
		}
		found = append(found, d)
	}
	slices.SortFunc(found, func(a, b descriptor) int { return a.number - b.number })
	return found, nil
}

// streams returns the descriptors of processes whose other end is elsewhere: Unix sockets, pipes,
// and of the first three also files and terminals.
func streams(pids []int) ([]checkpoint.Stream, error) {
	var all []descriptor
	for _, pid := range pids {
		of, err := descriptors(pid)
		if err != nil {
			return nil, err
		}
		all = append(all, of...)
	}
	peers, err := peersIn(pids[0])
	if err != nil {
		return nil, fmt.Errorf("list the Unix sockets: %w", err)
	}
	inodes := map[uint64]bool{}
	ends := map[uint64][2]bool{} // of pipes: is there a reader, a writer
	for _, d := range all {
		inodes[d.info.Ino] = true
		if strings.HasPrefix(d.link, "pipe:[") {
			both := ends[d.info.Ino]
			both[0], both[1] = both[0] || !d.writes, both[1] || d.writes
			ends[d.info.Ino] = both
		}
	}
	var found []checkpoint.Stream
	owner := map[string]int{}
	add := func(d descriptor, kind, id string) {
		i := slices.IndexFunc(found, func(s checkpoint.Stream) bool { return s.ID == id })
		if i < 0 {
			found = append(found, checkpoint.Stream{ID: id, Kind: kind, Descriptors: []int{d.number}})
			owner[id] = d.process
		} else if owner[id] == d.process {
			found[i].Descriptors = append(found[i].Descriptors, d.number)
		}
	}
	for _, d := range all {
		switch {
		case strings.HasPrefix(d.link, "pipe:["):
			if ends[d.info.Ino] != [2]bool{true, true} {
				add(d, "pipe", d.link)
			}
		case strings.HasPrefix(d.link, "socket:["):
			if peer := peers[uint32(d.info.Ino)]; peer != 0 && !inodes[uint64(peer)] {
				add(d, "socket", d.link)
			}
		case d.number > 2:
		case d.info.Mode&syscall.S_IFMT == syscall.S_IFREG:
			add(d, "file", fmt.Sprintf("file[%x:%x]", d.mount, d.info.Ino))
		case strings.HasPrefix(d.link, "/dev/pts/") || strings.HasPrefix(d.link, "/dev/tty"):
			add(d, "terminal", fmt.Sprintf("tty[%x:%x]", d.info.Rdev, d.info.Dev))
		}
	}
	return found, nil
}

// external are the arguments of a dump that leave a stream out of the image.
func external(s checkpoint.Stream) []string {
	switch s.Kind {
	case "socket":
		return []string{"--external", "unix" + strings.TrimPrefix(s.ID, "socket:")}
	case "file", "terminal":
		return []string{"--external", s.ID}
	}
	return nil // CRIU needs no argument for a pipe
}

// peersIn returns the peer of each connected Unix socket, by inode, in the network namespace of a
// process.
func peersIn(pid int) (peers map[uint32]uint32, err error) {
	same, err := sameNamespace(pid, "net")
	if err != nil {
		return nil, err
	}
	if same {
		return unixPeers()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and not unlocked: the thread ends, as it is in another namespace
		if err = enterNetwork(proc(pid, "ns", "net")); err == nil {
			peers, err = unixPeers()
		}
	}()
	<-done
	return peers, err
}

// enterNetwork moves this thread to a network namespace.
func enterNetwork(path string) error {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
}

// Of linux/sock_diag.h and linux/unix_diag.h.
const (
	sockDiagByFamily = 20
	showPeer         = 4
	attributePeer    = 2
	requestBytes     = syscall.NLMSG_HDRLEN + 24
	answerBytes      = 16
)

func unixPeers() (map[uint32]uint32, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	order := binary.NativeEndian
	request := make([]byte, requestBytes)
	order.PutUint32(request[0:], requestBytes)
	order.PutUint16(request[4:], sockDiagByFamily)
	order.PutUint16(request[6:], syscall.NLM_F_REQUEST|syscall.NLM_F_DUMP)
	request[syscall.NLMSG_HDRLEN] = unix.AF_UNIX
	order.PutUint32(request[syscall.NLMSG_HDRLEN+4:], ^uint32(0)) // in every state
	order.PutUint32(request[syscall.NLMSG_HDRLEN+12:], showPeer)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	peers := map[uint32]uint32{}
	buffer := make([]byte, 64<<10)
	for {
		n, _, err := unix.Recvfrom(fd, buffer, 0)
		if err != nil {
			return nil, err
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return nil, err
		}
		for _, m := range messages {
			switch m.Header.Type {
			case syscall.NLMSG_DONE:
				return peers, nil
			case syscall.NLMSG_ERROR:
				return nil, fmt.Errorf("the kernel refused with error %d", int32(order.Uint32(m.Data)))
			}
			if len(m.Data) < answerBytes {
				continue
			}
			inode := order.Uint32(m.Data[4:])
			for rest := m.Data[answerBytes:]; len(rest) >= 4; {
				size, kind := int(order.Uint16(rest)), order.Uint16(rest[2:])
				if size < 4 || size > len(rest) {
					break
				}
				if kind == attributePeer && size >= 8 {
					peers[inode] = order.Uint32(rest[4:])
				}
				rest = rest[min(len(rest), (size+3)&^3):]
			}
		}
	}
}
