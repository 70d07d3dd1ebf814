//go:build amd64 || arm64

package crashtest

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Record runs a command to its end and adds its operations below a folder to a log, except those on
// files that skip names. The command must exit with code 0; its output must be files. Record traces
// the threads of the command, not its children.
func Record(cmd *exec.Cmd, root string, skip func(path string) bool, log *Log) error {
	runtime.LockOSThread() // only the thread that started the command may trace it
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	pid := cmd.Process.Pid
	var status unix.WaitStatus
	if _, err := unix.Wait4(pid, &status, unix.WALL, nil); err != nil {
		return err
	}
	options := unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_EXITKILL
	if err := errors.Join(unix.PtraceSetOptions(pid, options), unix.PtraceSyscall(pid, 0)); err != nil {
		return fmt.Errorf("trace the command: %w", err)
	}
	r := &recorder{root: root, skip: skip, log: log, calls: map[int]*call{}}
	known := map[int]bool{pid: true}
	for {
		tid, err := unix.Wait4(-1, &status, unix.WALL|unix.WNOTHREAD, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for the command: %w", err)
		}
		if status.Exited() || status.Signaled() {
			if tid != pid {
				continue
			}
			if status.ExitStatus() != 0 {
				return fmt.Errorf("the command ended with exit code %d, signal %v", status.ExitStatus(), status.Signal())
			}
			return cmd.Process.Release()
		}
		deliver := 0
		switch signal := status.StopSignal(); {
		case signal == unix.SIGTRAP|0x80:
			if err := r.stopped(tid); err != nil {
				_ = cmd.Process.Kill()
				return err
			}
		case signal == unix.SIGTRAP: // a thread was made
		case signal == unix.SIGSTOP && !known[tid]: // a new thread
			known[tid] = true
		default:
			deliver = int(signal)
		}
		if err := unix.PtraceSyscall(tid, deliver); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("continue the command: %w", err)
		}
	}
}

// call is a system call that a thread has begun.
type call struct {
	op     Op
	copied bool // the kernel moves the bytes, whose number the call returns
}

type recorder struct {
	root  string
	skip  func(path string) bool
	log   *Log
	calls map[int]*call // by thread
}

// stopped handles the beginning or the end of a system call.
func (r *recorder) stopped(tid int) error {
	var info [88]byte // struct ptrace_syscall_info
	_, _, failed := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GET_SYSCALL_INFO, uintptr(tid), uintptr(len(info)), uintptr(unsafe.Pointer(&info)), 0, 0)
	if failed == unix.ESRCH { // another thread has ended the process
		return nil
	}
	if failed != 0 {
		return fmt.Errorf("read a system call: %w", failed)
	}
	word := func(n int) uint64 { return binary.NativeEndian.Uint64(info[24+8*n:]) }
	if info[0] == unix.PTRACE_SYSCALL_INFO_ENTRY {
		c := r.begin(tid, word(0), [6]uint64{word(1), word(2), word(3), word(4), word(5), word(6)})
		r.calls[tid] = c
		return nil
	}
	c := r.calls[tid]
	delete(r.calls, tid)
	if c == nil || info[32] != 0 { // it failed
		return nil
	}
	return r.end(c, int64(word(0)))
}

// begin returns what a system call is about to do; nil: nothing that is recorded.
func (r *recorder) begin(tid int, number uint64, args [6]uint64) *call {
	file := func(dir, name uint64) string { return r.path(tid, int32(dir), name) }
	switch name := cmp.Or(names[number], legacy[number]); name {
	case "openat", "open":
		dir, path, flags := args[0], args[1], args[2]
		if name == "open" {
			dir, path, flags = here, args[0], args[1]
		}
		if flags&(unix.O_CREAT|unix.O_TRUNC) == 0 || flags&unix.O_TMPFILE == unix.O_TMPFILE {
			return nil
		}
		c := r.of(Op{Kind: Truncate, Path: file(dir, path)})
		if c == nil {
			return nil
		}
		if _, err := os.Lstat(filepath.Join(r.root, c.op.Path)); err != nil {
			c.op.Kind = Create
		} else if flags&unix.O_TRUNC == 0 {
			return nil
		}
		return c
	case "write", "pwrite64", "writev", "copy_file_range", "sendfile", "splice":
		fd := args[0]
		if name == "copy_file_range" || name == "splice" {
			fd = args[2]
		}
		c := r.of(Op{Kind: Write, Path: r.descriptor(tid, int32(fd))})
		if c == nil {
			return nil
		}
		c.copied = true
		if name == "pwrite64" {
			c.op.Offset = int64(args[3])
			return c
		}
		c.op.Offset = r.position(tid, int32(fd), c.op.Path)
		return c
	case "ftruncate":
		return r.of(Op{Kind: Truncate, Path: r.descriptor(tid, int32(args[0])), Offset: int64(args[1])})
	case "mkdirat":
		return r.of(Op{Kind: Mkdir, Path: file(args[0], args[1])})
	case "mkdir":
		return r.of(Op{Kind: Mkdir, Path: file(here, args[0])})
	case "unlinkat":
		return r.of(Op{Kind: Remove, Path: file(args[0], args[1])})
	case "unlink", "rmdir":
		return r.of(Op{Kind: Remove, Path: file(here, args[0])})
	case "linkat":
		return r.of(Op{Kind: Link, Path: file(args[0], args[1]), To: file(args[2], args[3])})
	case "link":
		return r.of(Op{Kind: Link, Path: file(here, args[0]), To: file(here, args[1])})
	case "renameat", "renameat2":
		return r.of(Op{Kind: Rename, Path: file(args[0], args[1]), To: file(args[2], args[3])})
	case "rename":
		return r.of(Op{Kind: Rename, Path: file(here, args[0]), To: file(here, args[1])})
	}
	return nil
}

// here stands for the working directory, where a call has no descriptor of a folder.
const here = uint64(1<<32 + unix.AT_FDCWD)

// of makes the paths of an operation relative; nil if they are not below the folder.
func (r *recorder) of(op Op) *call {
	for _, path := range []*string{&op.Path, &op.To} {
		if *path == "" && path == &op.To {
			continue
		}
		rel, err := filepath.Rel(r.root, *path)
		if err != nil || !filepath.IsLocal(rel) || r.skip(rel) || strings.HasSuffix(rel, " (deleted)") {
			return nil
		}
		*path = rel
	}
	return &call{op: op}
}

// end records a call that has succeeded.
func (r *recorder) end(c *call, result int64) error {
	if c.copied {
		if result == 0 {
			return nil
		}
		f, err := os.Open(filepath.Join(r.root, c.op.Path))
		if err != nil {
			return err
		}
		defer f.Close()
		c.op.Data = make([]byte, result)
		if _, err := f.ReadAt(c.op.Data, c.op.Offset); err != nil {
			return fmt.Errorf("read what was written: %s: %w", c.op, err)
		}
	}
	r.log.Add(c.op)
	return nil
}

// path returns the path of an argument of a call.
func (r *recorder) path(tid int, dir int32, address uint64) string {
	memory, err := os.Open(fmt.Sprintf("/proc/%d/mem", tid))
	if err != nil {
		return ""
	}
	defer memory.Close()
	var name []byte
	for part := make([]byte, 64); !bytes.ContainsRune(name, 0); {
		n, err := memory.ReadAt(part, int64(address)+int64(len(name)))
		if name = append(name, part[:n]...); err != nil {
			return ""
		}
	}
	path, _, _ := strings.Cut(string(name), "\x00")
	switch {
	case filepath.IsAbs(path):
		return filepath.Clean(path)
	case dir == unix.AT_FDCWD:
		base, _ := os.Readlink(fmt.Sprintf("/proc/%d/cwd", tid))
		return filepath.Join(base, path)
	}
	return filepath.Join(r.descriptor(tid, dir), path)
}

func (r *recorder) descriptor(tid int, fd int32) string {
	path, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", tid, fd))
	return path
}

// position returns where the next write of a descriptor begins.
func (r *recorder) position(tid int, fd int32, path string) (at int64) {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", tid, fd))
	for line := range strings.Lines(string(raw)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":\t")
		switch name {
		case "pos":
			at, _ = strconv.ParseInt(value, 10, 64)
		case "flags":
			if flags, _ := strconv.ParseInt(value, 8, 64); flags&unix.O_APPEND != 0 {
				info, err := os.Stat(filepath.Join(r.root, path))
				if err == nil {
					return info.Size()
				}
			}
		}
	}
	return at
}

// names are the system calls that change files. Older architectures have more of them, legacy.
var names = map[uint64]string{
	unix.SYS_OPENAT: "openat", unix.SYS_WRITE: "write", unix.SYS_PWRITE64: "pwrite64", unix.SYS_WRITEV: "writev",
	unix.SYS_COPY_FILE_RANGE: "copy_file_range", unix.SYS_SENDFILE: "sendfile", unix.SYS_SPLICE: "splice",
	unix.SYS_FTRUNCATE: "ftruncate", unix.SYS_MKDIRAT: "mkdirat", unix.SYS_UNLINKAT: "unlinkat",
	unix.SYS_LINKAT: "linkat", unix.SYS_RENAMEAT: "renameat", unix.SYS_RENAMEAT2: "renameat2",
}
