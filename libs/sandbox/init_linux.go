package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// setup is what init needs to build a box.
type setup struct {
	Binds     []Bind `json:"binds"`
	Network   string `json:"network"`
	DiskBytes int64  `json:"disk_bytes"`
	Drop      bool   `json:"drop"` // init is uid 0 of its namespace and becomes boxID
	Pids      int    `json:"pids"`
	// Of its commands.
	Landlock bool     `json:"landlock"`
	Writable []string `json:"writable"` // folders and files that Landlock lets them write
	Watch    *watch   `json:"watch,omitempty"`
}

// order is a message from the supervisor to init.
type order struct {
	ID    int     `json:"id"`
	Kill  bool    `json:"kill,omitempty"`
	Start *launch `json:"start,omitempty"`
}

// prepare is the first message to a stage: what all commands of the box have in common.
type prepare struct {
	Landlock bool     `json:"landlock"`
	Writable []string `json:"writable"`
	Forks    bool     `json:"forks"`    // init decides on new processes
	Unshared bool     `json:"unshared"` // deny memory that belongs to no process
	Groups   int      `json:"groups"`   // cgroup.procs files that follow the socket
	Join     bool     `json:"join"`     // join the groups before the command is known
}

// launch is a command as the stage gets it, with its stdin, stdout, and stderr.
type launch struct {
	Argv           []string          `json:"argv"`
	Env            map[string]string `json:"env"`
	Cwd            string            `json:"cwd"`
	Files          []File            `json:"files,omitempty"`
	OpenFiles      int               `json:"open_files"`
	AddressBytes   int64             `json:"address_bytes,omitempty"` // 0: unlimited
	Processes      int               `json:"processes,omitempty"`     // 0: unlimited
	KeepBackground bool              `json:"keep_background,omitempty"`
	WallTimeS      float64           `json:"wall_time_s,omitempty"` // of the processes that it keeps; 0: unlimited
}

func (l launch) keptUntil() time.Time {
	if l.WallTimeS == 0 {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(l.WallTimeS * float64(time.Second)))
}

// notice is a message from init to the supervisor.
type notice struct {
	ID    int    `json:"id"`
	Ready bool   `json:"ready,omitempty"` // the box, or the command, was started
	Error *Error `json:"error,omitempty"`
	Exit  *exit  `json:"exit,omitempty"`
}

type exit struct {
	Code      int      `json:"code"` // -1: a signal
	Signal    int      `json:"signal,omitempty"`
	CPUTimeS  float64  `json:"cpu_time_s"`
	PeakBytes int64    `json:"peak_bytes"`
	Denied    []Denial `json:"denied,omitempty"`
	Hit       []string `json:"hit,omitempty"`
	Remaining bool     `json:"remaining,omitempty"` // processes of the command survived being killed
}

// Init is the first process of a box: it builds the root, drops its privileges, and starts
// commands until its socket closes. It returns the exit code of the process.
func Init() int {
	debug.SetGCPercent(400)
	if err := KeepFiles(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	conn, err := fileConn(os.NewFile(3, "supervisor"))
	if err != nil {
		fmt.Fprintln(os.Stderr, "rollout-sandbox init is started by rollout-sandbox alone:", err)
		return 64
	}
	var s setup
	files, err := receive(conn, &s)
	if err != nil {
		return 1
	}
	b := &initBox{conn: conn, groups: files, setup: s, commands: map[int]*command{}, stages: map[int]bool{}}
	if err := b.prepare(); err != nil {
		var typed *Error
		if !errors.As(err, &typed) {
			typed = fail(ReasonHost, "`rollout-sandbox probe` shows what this host can do", "the box can't be built: %v", err)
		}
		_ = b.send(notice{Error: typed})
		return 1
	}
	go b.reap()
	b.keepSpare()
	if err := b.send(notice{Ready: true}); err != nil {
		return 1
	}
	for {
		var o order
		files, err := receive(conn, &o)
		if err != nil {
			return 0 // the supervisor is gone: the kernel kills all processes of this namespace
		}
		switch {
		case o.Kill:
			b.kill(o.ID)
		case o.Start != nil:
			go b.begin(o.ID, *o.Start, files)
		}
	}
}

// initBox is the state of init.
type initBox struct {
	conn   *net.UnixConn
	groups []*os.File
	setup  setup
	exe    int // a read-only clone of this program
	forker forker

	sending sync.Mutex
	signals chan os.Signal

	mu       sync.Mutex // guards the rest, and keeps the reaper off until a start is recorded
	commands map[int]*command
	stages   map[int]bool // pids of stages that wait for their command

	keepUntil   time.Time // when the processes that commands kept are killed, unless keepForever
	keepForever bool

	sparing sync.Mutex // guards spare; held while it is started, which a start waits for
	spare   *stage     // waits while no command runs, so that the next one starts quickly
}

// stage is a process that has restricted itself and waits for a command to execute.
type stage struct {
	pid      int
	conn     *net.UnixConn
	notifier *os.File // nil if denied calls are not reported
}

// command is a running command.
type command struct {
	id, pid int
	keep    bool
	until   time.Time // when the processes that it keeps are killed; zero: with the box
	failed  bool      // it was not executed
	denials *denials
	hit     map[string]bool // limits that were reached
	settled chan struct{}   // closed when it was executed, or could not be
	ended   chan struct{}
}

func (b *initBox) send(n notice) error {
	b.sending.Lock()
	defer b.sending.Unlock()
	return writeFrame(b.conn, n)
}

func (b *initBox) prepare() error {
	// Commands may have the uid of init: no signal of theirs may end it.
	b.signals = make(chan os.Signal, 256)
	signal.Notify(b.signals)
	program, err := os.Executable() // not /proc/self/exe, which is a file of the supervisor's mount namespace
	if err != nil {
		return err
	}
	fd, _, err := cloneMount(program, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return err
	}
	// The numbers of the stage's files start at 0, and must not cover it.
	b.exe, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 100)
	unix.Close(fd)
	if err != nil {
		return err
	}
	if b.setup.Network == NetworkNone {
		if err := loopbackUp(); err != nil {
			return fmt.Errorf("start the loopback device: %w", err)
		}
	}
	if err := unix.Sethostname([]byte("sandbox")); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	if err := buildRoot(b.setup); err != nil {
		return err
	}
	if b.forker, err = newForker(); err != nil {
		return fmt.Errorf("drop from the bounding set: %w", err)
	}
	return dropPrivileges(b.setup.Drop)
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}

// forker starts the stages, all from one thread, whose bounding set is empty. The other threads
// have no capabilities either; a call for each capability in each thread would take milliseconds.
type forker struct {
	requests chan func()
}

func newForker() (forker, error) {
	f, ready := forker{requests: make(chan func())}, make(chan error)
	go func() {
		runtime.LockOSThread()
		var err error
		for c := uintptr(0); err == nil; c++ {
			if _, last := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); last != nil {
				break // past the last capability of this kernel
			}
			err = unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		}
		ready <- err
		for request := range f.requests {
			request()
		}
	}()
	return f, <-ready
}

// fork starts a process.
func (f forker) fork(path string, argv []string, attr *syscall.ProcAttr) (pid int, err error) {
	done := make(chan struct{})
	f.requests <- func() {
		pid, err = syscall.ForkExec(path, argv, attr)
		close(done)
	}
	<-done
	return pid, err
}

// dropPrivileges gives up every capability and, if it can, the uid, in all threads and for good.
func dropPrivileges(drop bool) error {
	all := func(what string, trap uintptr, args ...uintptr) error {
		var a [3]uintptr
		copy(a[:], args)
		if _, _, e := syscall.AllThreadsSyscall(trap, a[0], a[1], a[2]); e != 0 {
			return fmt.Errorf("%s: %w", what, e)
		}
		return nil
	}
	const locked = 1<<0 | 1<<1 | 1<<2 | 1<<3 | 1<<5 | 1<<6 | 1<<7 // NOROOT, NO_SETUID_FIXUP, KEEP_CAPS off but locked, NO_CAP_AMBIENT_RAISE
	if err := all("lock the secure bits", unix.SYS_PRCTL, unix.PR_SET_SECUREBITS, locked); err != nil {
		return err
	}
	if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0, 0); e != 0 {
		return fmt.Errorf("clear ambient capabilities: %w", e)
	}
	if drop {
		if err := syscall.Setgroups(nil); err != nil {
			return fmt.Errorf("drop groups: %w", err)
		}
		if err := syscall.Setresgid(boxID, boxID, boxID); err != nil {
			return fmt.Errorf("change the gid: %w", err)
		}
		if err := syscall.Setresuid(boxID, boxID, boxID); err != nil {
			return fmt.Errorf("change the uid: %w", err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := all("drop capabilities", unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0]))); err != nil {
		return err
	}
	if _, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); e != 0 {
		return fmt.Errorf("set no_new_privs: %w", e)
	}
	return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// begin starts a command and reports it if that fails.
func (b *initBox) begin(id int, l launch, files []*os.File) {
	err := b.start(id, l, files)
	for _, f := range files {
		f.Close()
	}
	if err == nil {
		return
	}
	var typed *Error
	if !errors.As(err, &typed) {
		typed = fail(ReasonStart, "", "%s can't be started: %v", l.Argv[0], err)
	}
	_ = b.send(notice{ID: id, Error: typed})
}

// start runs a command; files are its stdin, stdout, and stderr.
func (b *initBox) start(id int, l launch, files []*os.File) error {
	if len(files) != 3 {
		return fmt.Errorf("init got %d files instead of 3", len(files))
	}
	if l.Processes > 0 {
		own, _ := os.ReadDir("/proc/self/task")
		l.Processes += len(own) + 8 // the kernel counts the threads of init, too, which may become a few more
	}
	c := &command{id: id, keep: l.KeepBackground, until: l.keptUntil(), hit: map[string]bool{}, settled: make(chan struct{}), ended: make(chan struct{})}
	b.sparing.Lock()
	st := b.spare
	b.spare = nil
	b.sparing.Unlock()
	if st == nil || !b.adopt(c, st) {
		var err error
		if st, err = b.newStage(false); err != nil {
			return err
		}
		if !b.adopt(c, st) {
			return errors.New("its stage ended")
		}
	}
	if err := transmit(st.conn, l, files...); err != nil {
		return b.abandon(c, err)
	}
	defer st.conn.Close()
	// The stage reports that it will execute the command. Then its socket closes, or an error comes.
	for executing := false; ; executing = true {
		var from stageNotice
		_, err := receive(st.conn, &from)
		if errors.Is(err, io.EOF) && executing {
			break
		}
		if err != nil {
			return b.abandon(c, fmt.Errorf("its stage ended: %w", err))
		}
		if from.Error != nil {
			return b.abandon(c, from.Error)
		}
	}
	go b.observe(c)
	err := b.send(notice{ID: id, Ready: true})
	close(c.settled)
	return err
}

// adopt makes a stage the process of a command, before it can execute and end it. It reports
// whether the stage is still there.
func (b *initBox) adopt(c *command, st *stage) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.stages[st.pid] {
		st.conn.Close()
		return false
	}
	delete(b.stages, st.pid)
	c.pid = st.pid
	b.commands[c.id] = c
	if st.notifier != nil {
		c.denials = watchDenials(st.notifier, func() bool { return b.mayFork(c) })
	}
	return true
}

// newStage starts a stage and waits until it is restricted. With join it joins the groups of the
// box early, which takes the kernel 10 ms or more; its few threads count as processes until then.
func (b *initBox) newStage(join bool) (*stage, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	theirs := os.NewFile(uintptr(pair[1]), "stage")
	defer theirs.Close()
	st := &stage{}
	if st.conn, err = fileConn(os.NewFile(uintptr(pair[0]), "stage")); err != nil {
		return nil, err
	}
	fds := []uintptr{0, 1, 2, theirs.Fd()}
	for _, f := range b.groups {
		fds = append(fds, f.Fd())
	}
	b.mu.Lock()
	st.pid, err = b.forker.fork(fmt.Sprintf("/proc/self/fd/%d", b.exe), []string{"rollout-sandbox", "stage"}, &syscall.ProcAttr{
		Dir: "/", Files: fds, Env: []string{"GOMAXPROCS=1", "GOGC=off"}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if err == nil {
		b.stages[st.pid] = true
	}
	b.mu.Unlock()
	theirs.Close()
	if err == nil {
		err = transmit(st.conn, prepare{
			Landlock: b.setup.Landlock, Writable: b.setup.Writable, Forks: b.setup.Watch != nil && b.setup.Watch.Pids > 0,
			Unshared: b.setup.Watch != nil && b.setup.Watch.MemoryBytes > 0,
			Groups:   len(b.groups), Join: join,
		})
	}
	var from stageNotice
	var files []*os.File
	if err == nil {
		files, err = receive(st.conn, &from)
	}
	if err == nil && from.Error != nil {
		err = from.Error
	}
	if err != nil {
		b.mu.Lock()
		if b.stages[st.pid] {
			_ = unix.Kill(st.pid, unix.SIGKILL)
			delete(b.stages, st.pid)
		}
		b.mu.Unlock()
		st.conn.Close()
		return nil, err
	}
	if len(files) == 1 {
		st.notifier = files[0]
	}
	return st, nil
}

// fewPids is a limit of processes that a waiting stage would use up.
const fewPids = 16

// keepSpare starts a stage for the next command, if no command runs: a command and a spare stage
// would share the limits of the box.
func (b *initBox) keepSpare() {
	b.sparing.Lock()
	defer b.sparing.Unlock()
	b.mu.Lock()
	busy := len(b.commands)+len(b.stages) > 0
	b.mu.Unlock()
	if busy {
		return
	}
	st, err := b.newStage(b.setup.Pids >= fewPids)
	if err != nil {
		return // the next start reports why
	}
	b.spare = st
}

// abandon kills a stage that failed and forgets its command.
func (b *initBox) abandon(c *command, err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.commands[c.id] == c {
		_ = unix.Kill(c.pid, unix.SIGKILL)
	}
	delete(b.commands, c.id)
	c.failed = true
	close(c.settled)
	return err
}

// reap waits for every child: commands, and orphans that the kernel gives to the first process.
func (b *initBox) reap() {
	for sig := range b.signals {
		if sig != unix.SIGCHLD {
			continue
		}
		for {
			var status unix.WaitStatus
			var usage unix.Rusage
			b.mu.Lock()
			pid, err := unix.Wait4(-1, &status, unix.WNOHANG, &usage)
			delete(b.stages, pid)
			var ended *command
			for _, c := range b.commands {
				if c.pid == pid {
					ended = c
				}
			}
			b.mu.Unlock()
			if err == unix.EINTR {
				continue
			}
			if err != nil || pid <= 0 {
				break
			}
			if ended != nil {
				go b.finish(ended, status, usage)
			}
		}
	}
}

// finish kills what the command left behind and reports its end.
func (b *initBox) finish(c *command, status unix.WaitStatus, usage unix.Rusage) {
	e := exit{Code: status.ExitStatus(), PeakBytes: usage.Maxrss << 10}
	if status.Signaled() {
		e.Code, e.Signal = -1, int(status.Signal())
	}
	e.CPUTimeS = time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
	<-c.settled
	if c.failed {
		return
	}
	b.mu.Lock()
	delete(b.commands, c.id)
	b.mu.Unlock()
	close(c.ended)
	b.check(c)
	b.mu.Lock()
	keep := c.keep
	b.mu.Unlock()
	if keep {
		go b.observeKept(c)
	} else {
		e.Remaining = !b.killStrays()
	}
	b.mu.Lock()
	for reason := range c.hit {
		e.Hit = append(e.Hit, reason)
	}
	if c.denials != nil {
		e.Denied = c.denials.list()
	}
	b.mu.Unlock()
	_ = b.send(notice{ID: c.id, Exit: &e})
	b.keepSpare()
}

// receive reads one message and the files that came with it.
func receive(conn *net.UnixConn, value any) ([]*os.File, error) {
	var head [4]byte
	oob := make([]byte, unix.CmsgSpace(16*4))
	n, oobn, _, _, err := conn.ReadMsgUnix(head[:], oob)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, io.EOF
	}
	if _, err := io.ReadFull(conn, head[n:]); err != nil {
		return nil, err
	}
	var files []*os.File
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return nil, err
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return nil, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, readBody(conn, head, value)
}

// transmit sends one message with files.
func transmit(conn *net.UnixConn, value any, files ...*os.File) error {
	body, err := json.Marshal(value)
	if err != nil {
		return err
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	head := []byte{byte(len(body) >> 24), byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := conn.WriteMsgUnix(head, oob, nil); err != nil {
		return err
	}
	_, err = conn.Write(body)
	return err
}

func fileConn(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return nil, errors.New("the file is not a Unix socket")
	}
	return unixConn, nil
}
