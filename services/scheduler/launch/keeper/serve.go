package keeper

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
	"github.com/rollout-rl/rollout/services/scheduler/launch/local"
)

const (
	descriptor = 3 // of the listening socket
	// idleFor is how long a keeper without a worker and a connection waits for the next one.
	idleFor      = 2 * time.Second
	ownerTimeout = time.Second // of a message to an owner, which may be stopped
	// orphanStop is the time that a worker that no one has adopted gets to exit.
	orphanStop = 2 * time.Second
)

// Serve is the main function of a keeper. It returns when there is nothing left to keep, or after a
// signal, when all workers are stopped.
func Serve(signals <-chan os.Signal) error {
	syscall.CloseOnExec(descriptor)
	file := os.NewFile(descriptor, "keeper")
	if file == nil {
		return fmt.Errorf("descriptor %d is not the socket that the scheduler passes", descriptor)
	}
	listener, err := net.FileListener(file)
	_ = file.Close()
	if err != nil {
		return fmt.Errorf("listen on descriptor %d: %w", descriptor, err)
	}
	s := &server{kept: map[string]*kept{}, listener: listener}
	s.idle = time.AfterFunc(callTimeout, s.close)
	go func() {
		if _, ok := <-signals; ok {
			s.stopAll()
		}
	}()
	s.accept()
	if address, ok := listener.Addr().(*net.UnixAddr); ok {
		return os.RemoveAll(filepath.Dir(address.Name))
	}
	return nil
}

// server keeps the workers of one keeper. Safe for concurrent use.
type server struct {
	listener net.Listener

	mu     sync.Mutex
	kept   map[string]*kept // by id
	open   int              // connections
	idle   *time.Timer      // runs while there is nothing to keep
	closed bool
}

// kept is one worker. The lock of the server protects it.
type kept struct {
	process launch.Process
	grace   time.Duration
	epoch   uint64      // of its newest owner
	owner   net.Conn    // nil: an orphan
	orphan  *time.Timer // stops it; nil while it is owned
	left    uint64      // how often it became an orphan
	expired bool        // no one has adopted it in time, and it is being stopped
}

// acceptPause is how long the keeper waits after a connection that could not be accepted, for
// example for lack of descriptors: its workers would end with it.
const acceptPause = 100 * time.Millisecond

// accept serves connections until the keeper is idle.
func (s *server) accept() {
	for {
		conn, err := s.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			<-time.After(acceptPause)
			continue
		}
		s.mu.Lock()
		s.open++
		s.idle.Stop()
		s.mu.Unlock()
		go func() {
			s.serve(conn)
			_ = conn.Close()
			s.mu.Lock()
			defer s.mu.Unlock()
			s.open--
			s.rest()
		}()
	}
}

// rest starts the idle timer if there is nothing to keep. The caller has the lock.
func (s *server) rest() {
	if s.open == 0 && len(s.kept) == 0 {
		s.idle.Reset(idleFor)
	}
}

// close stops accepting, unless something arrived since the timer fired.
func (s *server) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == 0 && len(s.kept) == 0 {
		s.closed = true
		_ = s.listener.Close()
	}
}

// stopAll stops every worker, and ends the keeper.
func (s *server) stopAll() {
	s.mu.Lock()
	s.closed = true
	_ = s.listener.Close()
	var wg sync.WaitGroup
	for _, k := range s.kept {
		wg.Go(func() { k.process.Stop(orphanStop) })
	}
	s.mu.Unlock()
	wg.Wait()
}

// serve handles one connection: a request, then orders until it ends.
func (s *server) serve(conn net.Conn) {
	orders, answers := json.NewDecoder(conn), json.NewEncoder(conn)
	var asked request
	if orders.Decode(&asked) != nil {
		return
	}
	id, k, err := s.begin(asked, conn)
	if err != nil {
		_ = answers.Encode(reply{Error: err.Error()})
		return
	}
	pid := launch.PID(k.process)
	if answers.Encode(reply{ID: id, PID: pid}) != nil {
		s.leave(id, k, conn)
		return
	}
	go func() {
		<-k.process.Done()
		s.report(id, k, conn, answers)
	}()
	for {
		var o order
		if orders.Decode(&o) != nil {
			s.leave(id, k, conn)
			return
		}
		s.mu.Lock()
		owned := k.owner == conn
		if owned && !o.Stop {
			k.grace = o.Grace
		}
		s.mu.Unlock()
		if owned && o.Stop {
			go k.process.Stop(o.Grace)
		}
	}
}

// begin launches a worker, or changes the owner of one.
func (s *server) begin(asked request, conn net.Conn) (string, *kept, error) {
	if asked.Launch == nil {
		return s.adopt(asked, conn)
	}
	p, err := local.Launcher{Log: asked.Launch.Log}.Launch(asked.Launch.Command)
	if err != nil {
		return "", nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	k := &kept{process: p, grace: asked.Grace, epoch: asked.Epoch, owner: conn}
	s.kept[p.ID()] = k
	if s.closed { // a signal ends the keeper
		go p.Stop(orphanStop)
	}
	return p.ID(), k, nil
}

func (s *server) adopt(asked request, conn net.Conn) (string, *kept, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kept[asked.Adopt]
	if k == nil || k.expired {
		return "", nil, fmt.Errorf("there is no worker process %q", asked.Adopt)
	}
	if asked.Epoch < k.epoch {
		return "", nil, fmt.Errorf("leader %d owns the worker process %s; the caller was leader %d", k.epoch, asked.Adopt, asked.Epoch)
	}
	if before := k.owner; before != nil {
		_ = before.SetWriteDeadline(time.Now().Add(ownerTimeout))
		_ = json.NewEncoder(before).Encode(reply{Taken: true})
		_ = before.Close()
	}
	if k.orphan != nil {
		k.orphan.Stop()
		k.orphan = nil
	}
	k.owner, k.epoch, k.grace = conn, asked.Epoch, asked.Grace
	return asked.Adopt, k, nil
}

// leave makes the worker an orphan, if the connection owns it.
func (s *server) leave(id string, k *kept, conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.owner != conn {
		return
	}
	k.owner = nil
	k.left++
	left := k.left
	k.orphan = time.AfterFunc(k.grace, func() { s.expire(id, k, left) })
}

// expire stops a worker that no one has adopted since it became an orphan for the given time. A
// timer that fired just before it was stopped may call it later.
func (s *server) expire(id string, k *kept, left uint64) {
	s.mu.Lock()
	k.expired = k.expired || k.owner == nil && k.left == left
	expired := k.expired
	s.mu.Unlock()
	if !expired {
		return
	}
	k.process.Stop(orphanStop)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(id)
}

// report sends the exit of a worker to its owner, and forgets the worker. The exit of an orphan is
// kept for the scheduler that adopts it.
func (s *server) report(id string, k *kept, conn net.Conn, answers *json.Encoder) {
	exit := k.process.Exit()
	k.process.Stop(0) // frees its resources
	s.mu.Lock()
	defer s.mu.Unlock()
	if k.owner != conn {
		return
	}
	_ = conn.SetWriteDeadline(time.Now().Add(ownerTimeout))
	if answers.Encode(reply{Exit: &exit}) == nil {
		s.forget(id)
	}
}

// forget ends the care for a worker that has exited. The caller has the lock.
func (s *server) forget(id string) {
	delete(s.kept, id)
	s.rest()
}
