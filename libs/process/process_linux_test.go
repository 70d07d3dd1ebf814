package process

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

func TestTheListenerOfAnAddressIsFound(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		l, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		_, port, _ := net.SplitHostPort(l.Addr().String())
		host, _, _ := net.SplitHostPort(address)
		if host == "" {
			host = "127.0.0.1"
		}
		if p, found := Listener(net.JoinHostPort(host, port)); !found || p.PID != os.Getpid() || p.Stopped || p.UID != os.Getuid() {
			t.Errorf("%s: got %+v, %v", l.Addr(), p, found)
		}
		l.Close()
		if p, found := Listener(net.JoinHostPort(host, port)); found {
			t.Errorf("%s is closed: got %+v", l.Addr(), p)
		}
	}
	if _, found := Listener("192.0.2.1:80"); found {
		t.Error("an address of another host")
	}
}

func TestAStoppedProcessThatHasAFileOpenIsFound(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "held.lock")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	sleep := exec.Command("sleep", "600")
	sleep.ExtraFiles = []*os.File{file}
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sleep.Process.Kill(); _ = sleep.Wait() })
	if err := sleep.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for {
		found := Holding("sleep", "held.lock")
		if len(found) == 0 || !found[0].Stopped { // the signal is on its way
			<-time.After(time.Millisecond)
			continue
		}
		if len(found) != 1 || found[0].PID != sleep.Process.Pid || found[0].Path != path {
			t.Errorf("got %+v", found)
		}
		return
	}
}
