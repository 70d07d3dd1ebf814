package sandbox

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// hostID is the uid and gid of commands on the host when boxes are started by root. No account has
// it.
const hostID = 1_879_000_000

// Host starts boxes on this machine.
type Host struct {
	exe      string
	groups   cgroups
	landlock bool
	report   Report
}

// NewHost probes this machine. exe is the program that runs Init and Stage: rollout-sandbox.
func NewHost(exe string) *Host {
	h := &Host{exe: exe, groups: findCgroups()}
	h.groups.sweep()
	h.report = h.probe()
	return h
}

// KeepFiles keeps the open files of this process, also those that it inherited, from the programs
// that it starts: no box may get a file of the caller.
func KeepFiles() error {
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fail(ReasonHost, "use Linux 5.12 or later, and allow the system call close_range", "inherited files can't be kept from boxes: %v", err)
	}
	return nil
}

// Probe returns what this host enforces.
func (h *Host) Probe() Report { return h.report }

// Box is an open sandbox.
type Box struct {
	spec    Spec
	conn    *net.UnixConn
	process *exec.Cmd
	log     *tail
	group   *group
	done    chan struct{} // closed when init has ended and the group is removed

	mu       sync.Mutex
	sequence int
	running  map[int]*Process
	dead     bool
}

// Open builds a box, or refuses it.
func (h *Host) Open(spec Spec) (*Box, error) {
	spec, err := spec.fill()
	if err != nil {
		return nil, err
	}
	if err := h.report.allow(spec); err != nil {
		return nil, err
	}
	return h.build(spec)
}

// Run runs one command in a new box.
func (h *Host) Run(ctx context.Context, spec Spec, command Command) (Result, error) {
	box, err := h.Open(spec)
	if err != nil {
		return Result{}, err
	}
	defer box.Close()
	return box.Run(ctx, command)
}

// capabilities that init needs in its own user namespace until the box is built.
var capabilities = []uintptr{
	unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN, unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_SETPCAP, unix.CAP_SYS_CHROOT, unix.CAP_CHOWN,
	unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH, unix.CAP_FOWNER,
}

func (h *Host) build(spec Spec) (*Box, error) {
	root := os.Geteuid() == 0
	group, procs, err := h.groups.create(spec.Limits)
	if err != nil {
		return nil, fail(ReasonHost, "`rollout-sandbox probe` shows what this host can do", "the control group of the box can't be created: %v", err)
	}
	defer func() {
		for _, f := range procs {
			f.Close()
		}
	}()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		group.remove()
		return nil, err
	}
	theirs := os.NewFile(uintptr(pair[1]), "init")
	defer theirs.Close()
	conn, err := fileConn(os.NewFile(uintptr(pair[0]), "init"))
	if err != nil {
		group.remove()
		return nil, err
	}

	log := &tail{}
	cmd := exec.Command(h.exe, "init")
	cmd.Env = []string{"GOMAXPROCS=2", "GOTRACEBACK=none"}
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:      true,
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
		AmbientCaps: capabilities,
	}
	if spec.Network == NetworkNone {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNET
	}
	if root {
		// Init builds the root as uid 0 of the box, which can read every source, and then becomes hostID.
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}, {ContainerID: boxID, HostID: hostID, Size: 1}}
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = ids, ids
		cmd.SysProcAttr.GidMappingsEnableSetgroups = true
		cmd.SysProcAttr.AmbientCaps = nil // uid 0 keeps its capabilities
	} else {
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: boxID, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: boxID, HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		conn.Close()
		group.remove()
		return nil, fail(ReasonHost, namespaceFix(err), "namespaces can't be created: %v", err)
	}
	b := &Box{
		spec: spec, conn: conn, process: cmd, log: log, group: group, done: make(chan struct{}), running: map[int]*Process{},
	}
	s := setup{Binds: spec.Binds, Network: spec.Network, DiskBytes: spec.Limits.DiskBytes, Drop: root, Pids: spec.Limits.Pids,
		Landlock: h.landlock, Writable: []string{home, "/tmp", "/dev/shm"}}
	for _, bind := range spec.Binds {
		if bind.Writable {
			s.Writable = append(s.Writable, bind.Target)
		}
	}
	if group.memory == "" && !slices.Contains(spec.BestEffort, Memory) {
		s.Watch = &watch{MemoryBytes: spec.Limits.MemoryBytes}
	}
	if group.pids == "" && !slices.Contains(spec.BestEffort, Pids) {
		if s.Watch == nil {
			s.Watch = &watch{}
		}
		s.Watch.Pids = spec.Limits.Pids
	}
	first, err := b.handshake(s, procs)
	go b.wait()
	if err == nil && first.Error != nil {
		err = first.Error
	}
	if err != nil {
		b.Close()
		return nil, hostError(err)
	}
	go b.listen()
	return b, nil
}

func (b *Box) handshake(s setup, procs []*os.File) (first notice, err error) {
	if err := b.conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return first, err
	}
	if err := transmit(b.conn, s, procs...); err != nil {
		return first, b.lost(err)
	}
	if err := readFrame(b.conn, &first); err != nil {
		return first, b.lost(err)
	}
	return first, b.conn.SetDeadline(time.Time{})
}

func (b *Box) lost(err error) error {
	return fail(ReasonHost, "`rollout-sandbox probe` shows what this host can do", "the box ended while it was built: %v %s", err, b.log)
}

func hostError(err error) *Error {
	var typed *Error
	if errors.As(err, &typed) {
		return typed
	}
	return fail(ReasonHost, "", "the box can't be built: %v", err)
}

func namespaceFix(err error) string {
	switch {
	case errors.Is(err, unix.EPERM):
		return "a container's system call filter, AppArmor (kernel.apparmor_restrict_unprivileged_userns), or kernel.unprivileged_userns_clone=0 forbids them: " +
			"allow user namespaces, or start the container with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return "raise user.max_user_namespaces"
	case errors.Is(err, unix.EINVAL):
		return "use a kernel with user, pid, mount, network, ipc, uts, and cgroup namespaces"
	}
	return ""
}

// wait ends the box's bookkeeping when init has ended, and with it every process of the box.
func (b *Box) wait() {
	err := b.process.Wait()
	fmt.Fprintf(b.log, "its first process ended: %v", cmp.Or(err, errors.New("exit status 0")))
	b.conn.Close()
	b.mu.Lock()
	b.dead = true
	running := b.running
	b.running = map[int]*Process{}
	b.mu.Unlock()
	for _, p := range running {
		p.end(notice{Error: fail(ReasonLost, "", "the box ended while the command ran %s", b.log)})
	}
	b.group.remove()
	close(b.done)
}

// listen passes what init reports to the processes.
func (b *Box) listen() {
	for {
		var n notice
		if err := readFrame(b.conn, &n); err != nil {
			fmt.Fprintf(b.log, "it can't be supervised: %v; ", err)
			_ = b.process.Process.Kill()
			return
		}
		b.mu.Lock()
		p := b.running[n.ID]
		if p != nil && !n.Ready {
			delete(b.running, n.ID)
		}
		b.mu.Unlock()
		switch {
		case p == nil:
		case n.Ready:
			close(p.started)
		default:
			p.end(n)
		}
	}
}

// Close kills every process of the box and removes its files and its group. It returns when they
// are gone.
func (b *Box) Close() {
	_ = b.process.Process.Kill()
	<-b.done
}

// Process is a command that runs in a box.
type Process struct {
	Stdin          io.WriteCloser
	Stdout, Stderr io.ReadCloser

	box     *Box
	id      int
	began   time.Time
	before  events
	started chan struct{}
	ended   chan struct{}
	last    notice
	at      time.Time
	once    sync.Once
	startS  float64
}

func (p *Process) end(n notice) {
	p.once.Do(func() {
		p.last, p.at = n, time.Now()
		close(p.ended)
	})
}

// Start starts a command, which may run as long as the box unless it has a wall time. The caller
// reads Stdout and Stderr, closes all three files, and waits. A start that the context ends, or
// that takes longer than startLimit, closes the box if the command does not end.
func (b *Box) Start(ctx context.Context, command Command) (*Process, error) {
	wall := command.WallTimeS
	command, err := command.fill(b.spec.Limits)
	if err != nil {
		return nil, err
	}
	command.WallTimeS = wall
	return b.start(ctx, command)
}

func (b *Box) start(ctx context.Context, command Command) (*Process, error) {
	var theirs, ours [3]*os.File
	var all []*os.File
	closeAll := func() {
		for _, f := range all {
			f.Close()
		}
	}
	for i := range theirs {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll()
			return nil, fail(ReasonStart, "raise the limit of open files (`ulimit -n`)", "no pipe can be created: %v", err)
		}
		all = append(all, r, w)
		if theirs[i], ours[i] = w, r; i == 0 {
			theirs[i], ours[i] = r, w
		}
	}
	p := &Process{
		Stdin: ours[0], Stdout: ours[1], Stderr: ours[2], box: b, began: time.Now(), before: b.group.events(),
		started: make(chan struct{}), ended: make(chan struct{}),
	}
	limits := b.spec.Limits
	l := launch{
		Argv: command.Argv, Env: command.Env, Cwd: command.Cwd, Files: command.Files, KeepBackground: command.KeepBackground,
		WallTimeS: command.WallTimeS, OpenFiles: limits.OpenFiles,
	}
	if b.group.pids == "" && !slices.Contains(b.spec.BestEffort, Pids) {
		l.Processes = limits.Pids
	}
	if b.group.memory == "" && !slices.Contains(b.spec.BestEffort, Memory) {
		l.AddressBytes = max(2*limits.MemoryBytes, limits.MemoryBytes+1<<30)
	}
	b.mu.Lock()
	if b.dead {
		b.mu.Unlock()
		closeAll()
		return nil, fail(ReasonLost, "open another one", "the box has ended %s", b.log)
	}
	b.sequence++
	p.id = b.sequence
	b.running[p.id] = p
	err := transmit(b.conn, order{ID: p.id, Start: &l}, theirs[:]...)
	b.mu.Unlock()
	for _, f := range theirs {
		f.Close()
	}
	if err != nil {
		closeAll()
		return nil, fail(ReasonLost, "open another one", "the box has ended: %v %s", err, b.log)
	}
	limit := time.NewTimer(startLimit)
	defer limit.Stop()
	select {
	case <-p.started:
	case <-p.ended:
		if p.last.Error != nil {
			closeAll()
			return nil, p.last.Error
		}
	case <-ctx.Done():
		p.stop()
		closeAll()
		return nil, fail(ReasonStart, "", "%s was canceled before it was executed", command.Argv[0])
	case <-limit.C:
		p.stop()
		closeAll()
		return nil, fail(ReasonStart, "a file of the command may be on a disk that does not respond", "%s was not executed within %v", command.Argv[0], startLimit)
	}
	p.startS = time.Since(p.began).Seconds()
	p.began = time.Now()
	return p, nil
}

// Kill ends the command and everything it started.
func (p *Process) Kill() {
	p.box.mu.Lock()
	defer p.box.mu.Unlock()
	if p.box.running[p.id] == p {
		_ = transmit(p.box.conn, order{ID: p.id, Kill: true})
	}
}

// killGrace is how long init may take to end a command before its whole box is killed.
const killGrace = strayGrace + 2*time.Second

// startLimit is how long a command may take until it is executed.
const startLimit = 30 * time.Second

// stop ends the command for a reason that the supervisor knows.
func (p *Process) stop() {
	p.Kill()
	limit := time.NewTimer(killGrace)
	defer limit.Stop()
	select {
	case <-p.ended:
		return
	case <-p.started:
		p.Kill() // the first one may have come before there was a process
		select {
		case <-p.ended:
			return
		case <-limit.C:
		}
	case <-limit.C:
	}
	_ = p.box.process.Process.Kill()
	<-p.ended
}

// Wait returns the end of the command, without its output. The context and the wall time kill it.
func (p *Process) Wait(ctx context.Context, wall time.Duration) (Result, error) {
	var cause string
	timer := time.NewTimer(wall)
	defer timer.Stop()
	var expired <-chan time.Time
	if wall > 0 {
		expired = timer.C
	}
	select {
	case <-p.ended:
	case <-ctx.Done():
		if cause = Killed; errors.Is(context.Cause(ctx), errOutput) {
			cause = LimitOutput
		}
		p.stop()
	case <-expired:
		cause = LimitWall
		p.stop()
	}
	return p.result(cause)
}

var errOutput = errors.New("output limit")

func (p *Process) result(cause string) (Result, error) {
	r := Result{Reason: Exited, ExitCode: -1, WallTimeS: p.at.Sub(p.began).Seconds(), StartS: p.startS}
	after := p.box.group.events()
	hit := map[string]bool{}
	if e := p.last.Exit; e != nil {
		r.ExitCode, r.CPUTimeS, r.MemoryPeakBytes, r.Denied = e.Code, e.CPUTimeS, e.PeakBytes, e.Denied
		for _, reason := range e.Hit {
			hit[reason] = true
		}
		if e.Signal != 0 {
			r.Reason, r.Signal = Signaled, unix.SignalName(syscall.Signal(e.Signal))
		}
		if e.Remaining {
			_ = p.box.process.Process.Kill()
		}
	} else if cause == "" {
		return r, p.last.Error
	}
	if after.peak > 0 {
		r.MemoryPeakBytes = after.peak
	}
	hit[LimitMemory] = hit[LimitMemory] || after.oomKills > p.before.oomKills
	hit[LimitPids] = hit[LimitPids] || after.pidsMax > p.before.pidsMax
	if cause != "" {
		hit[cause] = cause != Killed
		r.Reason, r.Signal = cause, "SIGKILL"
	}
	for _, reason := range []string{LimitMemory, LimitOutput, LimitWall, LimitDisk, LimitPids} {
		if !hit[reason] {
			continue
		}
		r.LimitsHit = append(r.LimitsHit, reason)
		if cause == "" && r.ExitCode != 0 && (r.Reason == Exited || r.Reason == Signaled) {
			r.Reason = reason
		}
	}
	if len(r.Denied) > 0 && r.Reason == Exited && r.ExitCode != 0 {
		r.Reason = Denied
	}
	return r, nil
}

// Run runs a command to its end and collects its output.
func (b *Box) Run(ctx context.Context, command Command) (Result, error) {
	command, err := command.fill(b.spec.Limits)
	if err != nil {
		return Result{}, err
	}
	p, err := b.start(ctx, command)
	if err != nil {
		return Result{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	o := &output{left: command.OutputBytes, full: func() { cancel(errOutput) }}
	var readers sync.WaitGroup
	readers.Go(func() { o.collect(p.Stdout, &o.stdout, &o.stdoutCut) })
	readers.Go(func() { o.collect(p.Stderr, &o.stderr, &o.stderrCut) })
	go func() {
		_, _ = p.Stdin.Write(command.Stdin) // EPIPE: the command did not read it
		p.Stdin.Close()
	}()
	result, err := p.Wait(ctx, time.Duration(command.WallTimeS*float64(time.Second)))
	p.drain(&readers, command.KeepBackground)
	if err != nil {
		return Result{}, err
	}
	result.Stdout, result.Stderr = o.stdout.Bytes(), o.stderr.Bytes()
	result.StdoutTruncated, result.StderrTruncated = o.stdoutCut, o.stderrCut
	if (o.stdoutCut || o.stderrCut) && !slices.Contains(result.LimitsHit, LimitOutput) {
		result.Reason, result.LimitsHit = LimitOutput, append(result.LimitsHit, LimitOutput) // it ended before it was killed
	}
	return result, nil
}

// drain waits for the readers of a command that has ended and closes its files. Another process may
// keep the pipes: only what is in them by now belongs to the command.
func (p *Process) drain(readers *sync.WaitGroup, kept bool) {
	p.Stdin.Close()
	grace := time.Second
	if kept {
		grace = 50 * time.Millisecond
	}
	deadline := time.Now().Add(grace)
	for _, file := range []io.ReadCloser{p.Stdout, p.Stderr} {
		_ = file.(*os.File).SetReadDeadline(deadline)
	}
	readers.Wait()
	p.Stdout.Close()
	p.Stderr.Close()
}

// output collects two streams up to a common limit.
type output struct {
	mu                   sync.Mutex
	left                 int64
	full                 func()
	stdout, stderr       bytes.Buffer
	stdoutCut, stderrCut bool
}

func (o *output) collect(from io.Reader, into *bytes.Buffer, cut *bool) {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		o.mu.Lock()
		keep := min(int64(n), o.left)
		o.left -= keep
		into.Write(buffer[:keep])
		if keep < int64(n) {
			*cut = true
			o.full()
		}
		o.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// tail keeps the last of what init writes to its standard error.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	t.text = t.text[max(0, len(t.text)-4096):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.text) == 0 {
		return ""
	}
	return fmt.Sprintf("(%s)", strings.TrimSpace(string(t.text)))
}
