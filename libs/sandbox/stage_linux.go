package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/landlock-lsm/go-landlock/landlock"
	"golang.org/x/sys/unix"
)

// stageNotice is a message from the stage to init: that it is restricted, with the notifier of its
// filter; that it executes the command; or an error.
type stageNotice struct {
	Error *Error `json:"error,omitempty"`
}

// Stage restricts its own process as the command's limits say, then executes the command. It
// returns only if that fails.
func Stage() int {
	runtime.LockOSThread() // the filter is installed in this thread, which executes the command
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	conn, err := fileConn(os.NewFile(3, "init"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "rollout-sandbox stage is started by rollout-sandbox alone:", err)
		return 64
	}
	err = stageOf(conn)
	var typed *Error
	if !errors.As(err, &typed) {
		typed = fail(ReasonStart, "", "the command can't be started: %v", err)
	}
	_ = transmit(conn, stageNotice{Error: typed})
	return 1
}

// stageOf returns only if it fails.
func stageOf(conn *net.UnixConn) error {
	var p prepare
	if _, err := receive(conn, &p); err != nil {
		return err
	}
	if err := p.restrict(conn); err != nil {
		return err
	}
	var l launch
	files, err := receive(conn, &l)
	if err != nil {
		return err
	}
	return l.run(conn, files, p)
}

// restrict applies what cannot be undone and reports it, with the notifier of the filter.
func (p prepare) restrict(conn *net.UnixConn) error {
	if p.Landlock {
		if err := p.restrictFiles(); err != nil {
			return fmt.Errorf("apply Landlock: %w", err)
		}
	}
	filter, err := assembleFilter(p.Forks, p.Unshared)
	if err != nil {
		return err
	}
	if p.Join {
		if err := p.join(); err != nil {
			return err
		}
	}
	listener, err := installFilter(filter)
	if err != nil {
		return fmt.Errorf("install the system call filter: %w", err)
	}
	var files []*os.File
	if listener >= 0 {
		files = append(files, os.NewFile(uintptr(listener), "notifier"))
	}
	return transmit(conn, stageNotice{}, files...)
}

func (p prepare) join() error {
	for i := range p.Groups {
		if _, err := unix.Write(4+i, []byte("0")); err != nil {
			return fmt.Errorf("join the control group: %w", err)
		}
	}
	return nil
}

// run executes the command.
func (l launch) run(conn *net.UnixConn, files []*os.File, p prepare) error {
	for _, f := range l.Files {
		if err := f.write(l.Cwd); err != nil {
			return fail(ReasonSpec, "write below /home/sandbox, /tmp, or a writable bind", "files: %v", err)
		}
	}
	if err := unix.Chdir(l.Cwd); err != nil {
		return fail(ReasonSpec, "write a file to it with `files`, or bind it", "cwd: %s: %v", l.Cwd, err)
	}
	path, err := l.find()
	if err != nil {
		return err
	}
	var env []string
	for name, value := range l.Env {
		env = append(env, name+"="+value)
	}
	for i, f := range files {
		if err := unix.Dup3(int(f.Fd()), i, 0); err != nil {
			return err
		}
	}
	if err := transmit(conn, stageNotice{}); err != nil {
		return err
	}
	// From here this process counts: no thread may start before the command is executed.
	if !p.Join {
		if err := p.join(); err != nil {
			return err
		}
	}
	if err := l.limit(); err != nil {
		return err
	}
	if err := KeepFiles(); err != nil {
		return err
	}
	return fmt.Errorf("execute %s: %w", path, syscall.Exec(path, l.Argv, env))
}

// restrictFiles lets the command read and execute what the box shows, and write where it may.
func (p prepare) restrictFiles() error {
	rules := []landlock.Rule{
		landlock.RODirs("/").WithRefer(), landlock.RWFiles("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
	}
	for _, path := range p.Writable {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if info.IsDir() {
			rules = append(rules, landlock.RWDirs(path).WithRefer())
		} else {
			rules = append(rules, landlock.RWFiles(path))
		}
	}
	config := landlock.V8
	config.HandledAccessNet = 0 // the box has a separate network
	return config.BestEffort().Restrict(rules...)
}

// write creates the file, and the folders on the way.
func (f File) write(cwd string) error {
	path := f.Path
	if !filepath.IsAbs(path) {
		path = filepath.Join(cwd, path)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	mode := fs.FileMode(f.Mode) & fs.ModePerm
	if mode == 0 {
		mode = 0o644
	}
	// A pipe or a device in its place would block, or take the content elsewhere.
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NONBLOCK|unix.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil {
		return err
	} else if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", path)
	}
	if err := file.Truncate(0); err != nil {
		return err
	}
	if _, err := file.Write(f.Content); err != nil {
		return err
	}
	return file.Chmod(mode)
}

// find looks the program up in the PATH of the command.
func (l launch) find() (string, error) {
	name := l.Argv[0]
	missing := func(err error) error {
		return fail(ReasonNoFile, "bind the folder that has it, or give its path in the box", "%s is not in the box: %v", name, err)
	}
	if strings.Contains(name, "/") {
		if filepath.IsAbs(name) {
			name = filepath.Clean(name) // folders before a .. need not be in the box
		}
		if _, err := os.Stat(name); err != nil {
			return "", missing(err)
		}
		return name, nil
	}
	for dir := range strings.SplitSeq(l.Env["PATH"], ":") {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", missing(exec.ErrNotFound)
}

// limit sets the rlimits, last: the Go runtime needs memory and threads.
func (l launch) limit() error {
	limits := map[int]uint64{
		// 1, not 0: a piped core_pattern ignores 0 and would start its program on the host.
		unix.RLIMIT_CORE: 1, unix.RLIMIT_NOFILE: uint64(l.OpenFiles),
	}
	if l.Processes > 0 {
		limits[unix.RLIMIT_NPROC] = uint64(l.Processes)
	}
	if l.AddressBytes > 0 {
		limits[unix.RLIMIT_AS] = uint64(l.AddressBytes)
	}
	for resource, n := range limits {
		var old unix.Rlimit
		if err := unix.Getrlimit(resource, &old); err != nil {
			return err
		}
		n = min(n, old.Max)
		// The Go wrapper of setrlimit restores RLIMIT_NOFILE at exec; the system call does not.
		if err := unix.Prlimit(0, resource, &unix.Rlimit{Cur: n, Max: n}, nil); err != nil {
			return fmt.Errorf("set resource limit %d to %d: %w", resource, n, err)
		}
	}
	return nil
}
