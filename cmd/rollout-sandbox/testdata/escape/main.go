// Command escape tries to leave a box. It prints the error of each attempt and exits with code 3 if
// it was refused, and with 0 if it succeeded.
package main

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// calls are system calls that reach other processes, other namespaces, or the kernel.
var calls = map[string]func() error{
	"ptrace":            func() error { return unix.PtraceSeize(os.Getppid()) },
	"process_vm_readv":  func() error { return raw(unix.SYS_PROCESS_VM_READV, 1, 0, 0, 0, 0, 0) },
	"mount":             func() error { return unix.Mount("none", "/tmp", "tmpfs", 0, "") },
	"umount2":           func() error { return unix.Unmount("/proc", unix.MNT_DETACH) },
	"pivot_root":        func() error { return unix.PivotRoot("/tmp", "/tmp") },
	"chroot":            func() error { return unix.Chroot("/tmp") },
	"unshare":           func() error { return unix.Unshare(unix.CLONE_NEWUSER) },
	"setns":             func() error { return unix.Setns(0, unix.CLONE_NEWNS) },
	"clone":             func() error { return raw(unix.SYS_CLONE, unix.CLONE_NEWUSER|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0) },
	"bpf":               func() error { return raw(unix.SYS_BPF, 0, 0, 0, 0, 0, 0) },
	"perf_event_open":   func() error { return raw(unix.SYS_PERF_EVENT_OPEN, 0, 0, ^uintptr(0), ^uintptr(0), 0, 0) },
	"io_uring_setup":    func() error { return raw(unix.SYS_IO_URING_SETUP, 8, 0, 0, 0, 0, 0) },
	"userfaultfd":       func() error { return raw(unix.SYS_USERFAULTFD, 0, 0, 0, 0, 0, 0) },
	"keyctl":            func() error { return raw(unix.SYS_KEYCTL, 0, 0, 0, 0, 0, 0) },
	"open_by_handle_at": func() error { return raw(unix.SYS_OPEN_BY_HANDLE_AT, 0, 0, 0, 0, 0, 0) },
	"move_mount":        func() error { return raw(unix.SYS_MOVE_MOUNT, 0, 0, 0, 0, 0, 0) },
	"open_tree":         func() error { return raw(unix.SYS_OPEN_TREE, 0, 0, unix.OPEN_TREE_CLONE, 0, 0, 0) },
	"fsopen":            func() error { return raw(unix.SYS_FSOPEN, 0, 0, 0, 0, 0, 0) },
	"init_module":       func() error { return raw(unix.SYS_INIT_MODULE, 0, 0, 0, 0, 0, 0) },
	"kexec_load":        func() error { return raw(unix.SYS_KEXEC_LOAD, 0, 0, 0, 0, 0, 0) },
	"reboot":            func() error { return raw(unix.SYS_REBOOT, 0, 0, 0, 0, 0, 0) },
	"syslog":            func() error { return raw(unix.SYS_SYSLOG, 3, 0, 0, 0, 0, 0) },
	"socket":            func() error { return raw(unix.SYS_SOCKET, unix.AF_VSOCK, unix.SOCK_STREAM, 0, 0, 0, 0) },
}

// quiet are attempts that no filter counts: they fail for another reason.
var quiet = map[string]func() error{
	"clone3":   func() error { return raw(unix.SYS_CLONE3, 0, 0, 0, 0, 0, 0) },
	"setuid":   func() error { return raw(unix.SYS_SETUID, 0, 0, 0, 0, 0, 0) },
	"capset":   capset,
	"rlimit":   func() error { return unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1 << 30, Max: 1 << 30}) },
	"mknod":    func() error { return unix.Mknod("/tmp/disk", unix.S_IFBLK|0o600, int(unix.Mkdev(254, 0))) },
	"unknown":  func() error { return raw(1000, 0, 0, 0, 0, 0, 0) },
	"loopback": func() error { return dial("tcp", os.Args[2]) },
	"metadata": func() error { return dial("tcp", "169.254.169.254:80") },
	"abstract": func() error { return dial("unix", os.Args[2]) },
	"datagram": func() error { return send(os.Args[2]) },
}

func main() {
	runtime.LockOSThread()
	name := os.Args[1]
	if try := calls[name]; try != nil {
		report(name, try())
	}
	if try := quiet[name]; try != nil {
		report(name, try())
	}
	switch name {
	case "list":
		for call := range calls {
			fmt.Println(call)
		}
	case "forks":
		forks()
	case "memory":
		memory()
	case "signals":
		signals()
	case "stubborn":
		stubborn(os.Args[2])
	default:
		fmt.Println("unknown attempt", name)
		os.Exit(2)
	}
}

func report(name string, err error) {
	if err == nil {
		fmt.Println(name, "succeeded")
		os.Exit(0)
	}
	fmt.Println(name, err)
	os.Exit(3)
}

func raw(call uintptr, a, b, c, d, e, f uintptr) error {
	if _, _, errno := unix.RawSyscall6(call, a, b, c, d, e, f); errno != 0 {
		return errno
	}
	return nil
}

func capset() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{{Effective: 1 << unix.CAP_SYS_ADMIN, Permitted: 1 << unix.CAP_SYS_ADMIN}}
	return raw(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0, 0, 0, 0)
}

func dial(network, address string) error {
	conn, err := net.DialTimeout(network, address, time.Second)
	if err == nil {
		conn.Close()
	}
	return err
}

// send reports whether a datagram to a socket of the host can be sent.
func send(address string) error {
	conn, err := net.Dial("udp", address)
	if err != nil {
		return err
	}
	defer conn.Close()
	for range 2 { // the first refusal is reported by the second write
		if _, err = conn.Write([]byte("escaped")); err != nil {
			return err
		}
		_ = conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err = conn.Read(make([]byte, 1)); err != nil {
			return err
		}
	}
	return nil
}

// forks starts processes that start processes, until none can be started any more.
func forks() {
	for {
		pid, err := syscall.ForkExec("/proc/self/exe", os.Args, &syscall.ProcAttr{Files: []uintptr{0, 1, 2}, Env: []string{"GOMAXPROCS=1"}})
		if err != nil {
			fmt.Println(err)
			os.Exit(3)
		}
		fmt.Println(pid)
	}
}

// memory touches pages until it is stopped.
func memory() {
	var all [][]byte
	for {
		block := make([]byte, 1<<20)
		for i := range block {
			block[i] = 1
		}
		all = append(all, block)
		if len(all) > 2000 {
			fmt.Println("memory succeeded")
			os.Exit(0)
		}
	}
}

// signals tries to end every other process of the box.
func signals() {
	signal.Ignore(syscall.SIGTERM)
	refused := 0
	for s := syscall.Signal(1); s < 65; s++ {
		if unix.Kill(1, s) != nil {
			refused++
		}
	}
	fmt.Println("refused", refused)
	_ = unix.Kill(-1, syscall.SIGKILL)
}

// stubborn ignores signals, and starts a daemon of itself that does so, too.
func stubborn(marker string) {
	signal.Ignore()
	if !strings.HasSuffix(marker, "-daemon") {
		attr := &syscall.ProcAttr{Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true}}
		_, _ = syscall.ForkExec("/proc/self/exe", []string{os.Args[0], "stubborn", marker + "-daemon"}, attr)
		fmt.Println("started")
	}
	for {
		time.Sleep(time.Hour)
	}
}
