package keeper

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// scarce is a listener that has no descriptor for the first connection.
type scarce struct {
	net.Listener
	refused atomic.Bool
}

func (s *scarce) Accept() (net.Conn, error) {
	if s.refused.CompareAndSwap(false, true) {
		return nil, syscall.EMFILE
	}
	return s.Listener.Accept()
}

// A keeper outlives a moment without descriptors, and with it its workers.
func TestAKeeperWithoutDescriptorsContinues(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "socket")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{kept: map[string]*kept{}, listener: &scarce{Listener: listener}}
	s.idle = time.AfterFunc(time.Hour, s.close)
	ended := make(chan struct{})
	go func() { s.accept(); close(ended) }()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	var answer reply
	if err := json.NewEncoder(conn).Encode(request{Adopt: "none"}); err != nil {
		t.Fatal(err)
	}
	if err := json.NewDecoder(conn).Decode(&answer); err != nil || answer.Error == "" {
		t.Errorf("the answer: %+v, %v", answer, err)
	}
	_ = listener.Close()
	<-ended
}

// lasting is a worker that runs until it is stopped, which takes until ended is closed.
type lasting struct {
	stopping, ended chan struct{}
}

func (lasting) ID() string              { return "p" }
func (l lasting) Done() <-chan struct{} { return l.ended }
func (lasting) Exit() launch.Exit       { return launch.Exit{} }
func (l lasting) Stop(time.Duration)    { close(l.stopping); <-l.ended }

// The timer of an earlier time without an owner, which fired when the worker was adopted, does not
// stop it, also if the worker has lost that owner since. A worker that is being stopped is not
// adopted.
func TestAnOldTimerDoesNotStopAWorker(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("unix", filepath.Join(t.TempDir(), "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	p := lasting{make(chan struct{}), make(chan struct{})}
	first, firstEnd := net.Pipe()
	second, secondEnd := net.Pipe()
	for _, c := range []net.Conn{first, firstEnd, second, secondEnd} {
		defer c.Close()
	}
	k := &kept{process: p, grace: time.Hour, owner: first}
	s := &server{kept: map[string]*kept{"p": k}, listener: listener, idle: time.AfterFunc(time.Hour, func() {})}
	adopt := func(conn net.Conn) error {
		_, _, err := s.adopt(request{Adopt: "p", Grace: time.Hour}, conn)
		return err
	}
	s.leave("p", k, first)
	if err := adopt(second); err != nil {
		t.Fatal(err)
	}
	s.expire("p", k, 1)
	s.leave("p", k, second)
	s.expire("p", k, 1)
	select {
	case <-p.stopping:
		t.Fatal("an old timer stops the worker")
	default:
	}
	ended := make(chan struct{})
	go func() { s.expire("p", k, 2); close(ended) }()
	<-p.stopping
	if err := adopt(first); err == nil {
		t.Error("a worker that is being stopped was adopted")
	}
	close(p.ended)
	<-ended
	if len(s.kept) > 0 {
		t.Error("the stopped worker is kept")
	}
}

// A keeper that is suspended does not answer. Its worker is killed without it.
func TestStopDoesNotWaitForASuspendedKeeper(t *testing.T) {
	t.Parallel()
	worker := exec.Command("/bin/sleep", "1000")
	worker.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := worker.Start(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "socket")
	listener, err := net.Listen("unix", path) // no one accepts its connections
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	p := newProcess(conn, path, reply{ID: "p", PID: worker.Process.Pid})
	go p.follow(json.NewDecoder(conn))
	p.stopWithin(0, time.Millisecond)
	if e := p.Exit(); e.Code != -1 || len(e.LastLines) != 1 {
		t.Errorf("exit %+v", e)
	}
	state, err := worker.Process.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if status, ok := state.Sys().(syscall.WaitStatus); !ok || status.Signal() != os.Kill {
		t.Errorf("the worker ended with %v", state)
	}
	p.Stop(0) // returns
}
