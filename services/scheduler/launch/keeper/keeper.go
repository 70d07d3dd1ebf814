// Package keeper starts workers that outlive the scheduler that launched them, so that another
// scheduler on this host can adopt them.
//
// The parent of such a worker is a keeper: a small process with a session of its own, which a
// scheduler starts for its first worker and calls through a Unix socket. Each call is a connection
// that owns one worker. When the connection of the owner ends, because the scheduler died or has
// released the worker, another one can adopt the worker; if none does within the grace period, the
// keeper stops it. The keeper exits when it has no worker and no connection. If it is killed, its
// workers see the end of their standard input and exit.
//
//	            scheduler --connection, one per worker--> keeper --pipe, process group--> worker
//	launched --connection ends--> orphan --Adopt--> owned --exit is reported--> forgotten
//	                                |
//	                                +--grace period--> stopped --> forgotten
package keeper

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/local"
)

// DefaultGrace is how long a worker without an owner is kept: the time in which another scheduler
// takes the lease (2 s), also after a failover of the database.
const DefaultGrace = 30 * time.Second

const (
	callTimeout = 10 * time.Second // of a call, whose answer needs milliseconds
	separator   = "#"              // between the socket and the id in a handle
)

// The messages on a connection are JSON values. The first one of a client is a request, which a
// reply with an id or an error answers. Later a client sends orders, and the keeper sends the exit.
type (
	request struct {
		Launch *launchRequest // or
		Adopt  string         // id of a process
		Epoch  uint64         // of the leader that calls
		Grace  time.Duration  // of the process without an owner
	}
	launchRequest struct {
		Command launch.Command
		Log     local.LogLimits
	}
	order struct {
		Stop  bool          // ask the process to exit, and kill it after the grace period; or
		Grace time.Duration // replace that of the process without an owner
	}
	reply struct {
		ID    string       `json:",omitempty"`
		PID   int          `json:",omitempty"`
		Error string       `json:",omitempty"`
		Exit  *launch.Exit `json:",omitempty"`
		Taken bool         `json:",omitempty"` // another scheduler has adopted the process
	}
)

// Host starts the keeper of this process when it is needed. Safe for concurrent use.
type Host struct {
	// Program starts a keeper: a program that calls Serve.
	Program []string

	mu     sync.Mutex
	socket string // of the newest keeper; "" before the first one
}

// connect returns a connection to the keeper, which is started if it does not run.
func (h *Host) connect() (conn net.Conn, socket string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.socket != "" {
		if conn, err := net.Dial("unix", h.socket); err == nil {
			return conn, h.socket, nil
		}
	}
	if err := h.start(); err != nil {
		return nil, "", fmt.Errorf("start the keeper of the workers: %w", err)
	}
	conn, err = net.Dial("unix", h.socket)
	return conn, h.socket, err
}

// start starts a keeper. Its socket listens before the keeper runs, so a connection waits for it.
func (h *Host) start() error {
	folder, err := os.MkdirTemp("", "rollout-keeper-") // the path of a socket has at most 107 bytes, so not the state folder
	if err != nil {
		return err
	}
	path := filepath.Join(folder, "socket")
	err = h.run(path)
	if err != nil {
		return errors.Join(err, os.RemoveAll(folder))
	}
	h.socket = path
	return nil
}

func (h *Host) run(path string) error {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return err
	}
	listener.SetUnlinkOnClose(false)
	defer listener.Close()
	file, err := listener.File()
	if err != nil {
		return err
	}
	defer file.Close()
	cmd := exec.Command(h.Program[0], h.Program[1:]...)
	cmd.ExtraFiles = []*os.File{file}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // signals to the scheduler's group or terminal do not reach it
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }() // reaps it
	return nil
}

// Launcher implements launch.Keeper. Processes without Command.Keep are children of this process.
type Launcher struct {
	Local local.Launcher
	Host  *Host
	Epoch uint64        // of the leader that this process is; 0 without replicas
	Grace time.Duration // 0: DefaultGrace
}

// Launch implements launch.Launcher.
func (l Launcher) Launch(c launch.Command) (launch.Process, error) {
	if !c.Keep {
		return l.Local.Launch(c)
	}
	ask := request{Launch: &launchRequest{Command: c, Log: l.Local.Log}, Epoch: l.Epoch, Grace: cmp.Or(l.Grace, DefaultGrace)}
	for again := true; ; again = false {
		conn, socket, err := l.Host.connect()
		if err != nil {
			return nil, err
		}
		p, err := own(conn, socket, ask)
		if !again || !errors.Is(err, errLost) { // a keeper that was about to exit has accepted the connection
			return p, err
		}
	}
}

// Adopt implements launch.Keeper.
func (l Launcher) Adopt(handle string) (launch.Process, error) {
	socket, id, _ := strings.Cut(handle, separator)
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", launch.ErrGone, err)
	}
	p, err := own(conn, socket, request{Adopt: id, Epoch: l.Epoch, Grace: cmp.Or(l.Grace, DefaultGrace)})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", launch.ErrGone, err)
	}
	return p, nil
}

// errLost reports that a keeper did not answer.
var errLost = errors.New("the keeper of the worker does not answer")

// process is a worker that this process owns.
type process struct {
	id, handle string
	pid        int
	conn       net.Conn
	done       chan struct{} // closed when it has exited
	taken      chan struct{} // closed when this process does not own it any more
	exit       launch.Exit
	stop       sync.Once
	release    sync.Once
	silent     atomic.Bool // the keeper did not answer, and the worker was killed
}

func newProcess(conn net.Conn, socket string, got reply) *process {
	return &process{id: got.ID, handle: socket + separator + got.ID, pid: got.PID, conn: conn, done: make(chan struct{}), taken: make(chan struct{})}
}

// own sends the request, and owns the process of the answer.
func own(conn net.Conn, socket string, ask request) (launch.Process, error) {
	_ = conn.SetDeadline(time.Now().Add(callTimeout))
	answers := json.NewDecoder(conn)
	var got reply
	err := json.NewEncoder(conn).Encode(ask)
	if err == nil {
		err = answers.Decode(&got)
	}
	switch {
	case err != nil:
		return nil, errors.Join(fmt.Errorf("%w: %w", errLost, err), conn.Close())
	case got.Error != "":
		return nil, errors.Join(errors.New(got.Error), conn.Close())
	}
	_ = conn.SetDeadline(time.Time{})
	p := newProcess(conn, socket, got)
	go p.follow(answers)
	return p, nil
}

// follow waits for the exit.
func (p *process) follow(answers *json.Decoder) {
	var got reply
	err := answers.Decode(&got)
	_ = p.conn.Close()
	switch {
	case err == nil && got.Exit != nil:
		p.exit = *got.Exit
	case p.silent.Load():
		p.exit = launch.Exit{Code: -1, LastLines: []string{"the keeper of this worker did not answer, and the worker was killed"}}
	case err == nil && got.Taken, errors.Is(err, net.ErrClosed): // adopted by another scheduler, or released
		p.giveUp()
		return
	default: // its workers end with the keeper
		p.exit = launch.Exit{Code: -1, LastLines: []string{"the keeper of this worker was killed"}}
	}
	close(p.done)
}

func (p *process) giveUp() { p.release.Do(func() { close(p.taken) }) }

func (p *process) ID() string            { return p.id }
func (p *process) PID() int              { return p.pid }
func (p *process) Handle() string        { return p.handle }
func (p *process) Done() <-chan struct{} { return p.done }

// Exit implements launch.Process. It returns nothing of a process that was released or taken.
func (p *process) Exit() launch.Exit {
	select {
	case <-p.done:
		return p.exit
	case <-p.taken:
		return launch.Exit{}
	}
}

// Stop implements launch.Process. It leaves a process alone that was released or taken. If the
// keeper does not answer, because it is suspended, the process is killed without it.
func (p *process) Stop(grace time.Duration) { p.stopWithin(grace, callTimeout) }

// stopWithin is Stop with the time that the keeper has in addition to the grace period.
func (p *process) stopWithin(grace, answer time.Duration) {
	p.stop.Do(func() {
		_ = p.conn.SetWriteDeadline(time.Now().Add(answer))
		if json.NewEncoder(p.conn).Encode(order{Stop: true, Grace: grace}) != nil {
			_ = p.conn.Close() // the exit was reported, or the keeper is gone
		}
	})
	late := time.NewTimer(grace + answer)
	defer late.Stop()
	select {
	case <-p.done:
		return
	case <-p.taken:
		return
	case <-late.C:
	}
	// A suspended keeper lets no one adopt the process. It has not waited for it either, so the
	// number of the process is not used again.
	p.silent.Store(true)
	if p.pid > 0 {
		_ = syscall.Kill(-p.pid, syscall.SIGKILL)
	}
	_ = p.conn.Close()
	select {
	case <-p.done:
	case <-p.taken:
	}
}

// Release implements launch.Kept.
func (p *process) Release(grace time.Duration) {
	p.giveUp()
	if grace > 0 {
		_ = json.NewEncoder(p.conn).Encode(order{Grace: grace}) // fails if another scheduler owns it
	}
	_ = p.conn.Close()
}
