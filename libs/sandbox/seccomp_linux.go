package sandbox

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"unsafe"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// deniedCalls return EPERM and are counted. What neither the table of the library nor this list
// knows returns ENOSYS, as on an older kernel.
var deniedCalls = []string{
	// other processes
	"ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd", "migrate_pages", "move_pages",
	// file systems and namespaces
	"mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "open_tree_attr", "fsopen", "fsconfig", "fsmount", "fspick",
	"mount_setattr", "unshare", "setns", "name_to_handle_at", "open_by_handle_at", "quotactl", "quotactl_fd", "swapon", "swapoff",
	// large parts of the kernel that commands do not need
	"bpf", "perf_event_open", "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "fanotify_init", "fanotify_mark",
	"keyctl", "add_key", "request_key", "lookup_dcookie",
	// the machine
	"init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "acct", "syslog", "vhangup",
	"settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname", "iopl", "ioperm", "nfsservctl",
}

// unknownCalls return ENOSYS, so that C libraries use what can be filtered: the flags of clone3 are
// in memory.
var unknownCalls = []string{"clone3"}

const namespaceFlags = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER |
	unix.CLONE_NEWPID | unix.CLONE_NEWNET

// argumentRule denies a call by the low half of one argument, which is all that the kernel reads
// of it.
type argumentRule struct {
	call     string
	argument uint32
	bits     uint32   // denied if any of them is set
	equal    []uint32 // denied if it is one of them
	not      []uint32 // denied if it is none of them
}

var argumentRules = []argumentRule{
	{call: "clone", argument: 0, bits: namespaceFlags},
	{call: "ioctl", argument: 1, equal: []uint32{unix.TIOCSTI, unix.TIOCLINUX}},
	// Other families reach past the network namespace (vsock) or into large parts of the kernel.
	{call: "socket", argument: 0, not: []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}},
}

// assemble returns the instructions of the rule. The library's own conditions are not used: after
// one does not match, its filter compares the argument, not the call, with the calls that follow.
func (r argumentRule) assemble(number uint32) []bpf.Instruction {
	deny := bpf.RetConstant{Val: unix.SECCOMP_RET_USER_NOTIF}
	block := []bpf.Instruction{bpf.LoadAbsolute{Off: 16 + 8*r.argument, Size: 4}}
	switch {
	case r.bits != 0:
		block = append(block, bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: r.bits, SkipFalse: 1}, deny)
	case r.equal != nil:
		for _, value := range r.equal {
			block = append(block, bpf.JumpIf{Cond: bpf.JumpEqual, Val: value, SkipFalse: 1}, deny)
		}
	default:
		for i, value := range r.not {
			block = append(block, bpf.JumpIf{Cond: bpf.JumpEqual, Val: value, SkipTrue: uint8(len(r.not) - i)})
		}
		block = append(block, deny)
	}
	block = append(block, bpf.LoadAbsolute{Off: 0, Size: 4})
	return append([]bpf.Instruction{bpf.JumpIf{Cond: bpf.JumpEqual, Val: number, SkipFalse: uint8(len(block))}}, block...)
}

// forkCalls create processes and threads. The notifier decides on them where rlimits, which report
// nothing, limit their number.
var forkCalls = []string{"clone", "fork", "vfork"}

// unsharedCalls create memory that is counted for no process. They are denied where the memory of
// each process is watched.
var unsharedCalls = []string{"memfd_create", "memfd_secret", "shmget", "msgget"}

// assembleFilter translates the lists for this machine. With forks, init is asked about each new
// process and thread.
func assembleFilter(forks, unshared bool) ([]unix.SockFilter, error) {
	info, err := arch.GetInfo("")
	if err != nil {
		return nil, err
	}
	var denied, allowed []string
	for _, name := range slices.Sorted(maps.Keys(info.SyscallNames)) {
		switch {
		case slices.Contains(deniedCalls, name), forks && slices.Contains(forkCalls, name),
			unshared && slices.Contains(unsharedCalls, name):
			denied = append(denied, name)
		case !slices.Contains(unknownCalls, name):
			allowed = append(allowed, name)
		}
	}
	policy := seccomp.Policy{
		DefaultAction: seccomp.ActionErrno,
		Syscalls: []seccomp.SyscallGroup{
			{Action: seccomp.ActionUserNotify, Names: denied},
			{Action: seccomp.ActionAllow, Names: allowed},
		},
	}
	program, err := policy.Assemble()
	if err != nil {
		return nil, fmt.Errorf("assemble the system call filter: %w", err)
	}
	var checks []bpf.Instruction
	for _, rule := range argumentRules {
		number, ok := info.SyscallNames[rule.call]
		if !ok {
			return nil, fmt.Errorf("assemble the system call filter: %s has no number here", rule.call)
		}
		checks = append(checks, rule.assemble(uint32(number))...)
	}
	head := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(info.ID), SkipTrue: uint8(len(checks) + 1)}, // the policy refuses it
		bpf.LoadAbsolute{Off: 0, Size: 4},
	}
	program[len(program)-1] = bpf.RetConstant{Val: uint32(seccomp.ActionErrno) | uint32(unix.ENOSYS)}
	raw, err := bpf.Assemble(slices.Concat(head, checks, program))
	if err != nil {
		return nil, fmt.Errorf("assemble the system call filter: %w", err)
	}
	out := make([]unix.SockFilter, len(raw))
	for i, in := range raw {
		out[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	return out, nil
}

// installFilter filters this thread. The listener reports denied calls; it is -1 if another filter
// has one already, and denied calls then return EPERM uncounted.
func installFilter(filter []unix.SockFilter) (listener int, err error) {
	install := func(flags uintptr) (int, error) {
		program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
		fd, _, e := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&program)))
		if e != 0 {
			return -1, e
		}
		return int(fd), nil
	}
	listener, err = install(unix.SECCOMP_FILTER_FLAG_NEW_LISTENER)
	if err == nil {
		return listener, nil
	}
	for i := range filter {
		if filter[i].K == unix.SECCOMP_RET_USER_NOTIF {
			filter[i].K = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		}
	}
	_, err = install(0)
	return -1, err
}

// denials answers the calls that a filter denies, and counts them.
type denials struct {
	mu     sync.Mutex
	counts map[int32]int
}

// The records of seccomp's notifications, see seccomp_unotify(2).
type (
	notification struct {
		id         uint64
		pid, flags uint32
		call       int32
		arch       uint32
		pointer    uint64
		args       [6]uint64
	}
	answer struct {
		id    uint64
		value int64
		err   int32
		flags uint32
	}
)

// watchDenials answers until no process is filtered by the notifier. mayFork decides on new
// processes and threads.
func watchDenials(notifier *os.File, mayFork func() bool) *denials {
	d := &denials{counts: map[int32]int{}}
	forks := map[int32]bool{}
	if info, err := arch.GetInfo(""); err == nil {
		for _, name := range forkCalls {
			if number, ok := info.SyscallNames[name]; ok {
				forks[int32(number)] = true
			}
		}
	}
	decide := func(n notification) answer {
		if forks[n.call] && (n.args[0]&namespaceFlags == 0 || n.call != unix.SYS_CLONE) {
			if mayFork() {
				return answer{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
			}
			return answer{id: n.id, err: -int32(unix.EAGAIN)}
		}
		d.mu.Lock()
		d.counts[n.call]++
		d.mu.Unlock()
		return answer{id: n.id, err: -int32(unix.EPERM)}
	}
	go func() {
		defer notifier.Close()
		fd := int(notifier.Fd())
		for {
			poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			if _, err := unix.Poll(poll, -1); err == unix.EINTR {
				continue
			} else if err != nil || poll[0].Revents&unix.POLLIN == 0 {
				return
			}
			var n notification
			if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&n))); e != 0 {
				continue // the process died in between
			}
			a := decide(n)
			_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&a)))
		}
	}()
	return d
}

// list returns the counts by name.
func (d *denials) list() []Denial {
	info, err := arch.GetInfo("")
	if err != nil {
		return nil
	}
	names := map[int32]string{}
	for name, number := range info.SyscallNames {
		names[int32(number)] = name
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var out []Denial
	for call, count := range d.counts {
		out = append(out, Denial{Syscall: names[call], Count: count})
	}
	slices.SortFunc(out, func(a, b Denial) int { return b.Count - a.Count })
	return out
}
