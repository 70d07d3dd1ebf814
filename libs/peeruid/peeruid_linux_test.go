package peeruid_test

import (
	"net"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/peeruid"
)

// dialAs connects with a socket that belongs to another user, which only root can make.
func dialAs(t *testing.T, uid int, address string) net.Conn {
	t.Helper()
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // without unlocking: the thread ends with the goroutine
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(uid), 0, 0); errno != 0 {
			done <- result{err: errno}
			return
		}
		conn, err := net.Dial("tcp", address)
		done <- result{conn, err}
	}()
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	t.Cleanup(func() { r.conn.Close() })
	return r.conn
}

// accepted returns both ends of a loopback connection: the server's and the client's.
func accepted(t *testing.T, listen string, dial func(address string) net.Conn) (server, client net.Conn) {
	t.Helper()
	lis, err := net.Listen("tcp", listen)
	if err != nil {
		t.Skipf("this host cannot listen on %s: %v", listen, err)
	}
	defer lis.Close()
	client = dial(lis.Addr().String())
	server, err = lis.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return server, client
}

func TestTheOwnerOfTheOtherEndIsFound(t *testing.T) {
	t.Parallel()
	for _, listen := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(listen, func(t *testing.T) {
			t.Parallel()
			server, _ := accepted(t, listen, func(address string) net.Conn { return dialAs(t, os.Geteuid(), address) })
			if uid, ok := peeruid.Of(server); !ok || int(uid) != os.Geteuid() {
				t.Errorf("uid %d, known %t; want %d", uid, ok, os.Geteuid())
			}
			if os.Geteuid() != 0 {
				t.Skip("only root can make a socket of another user")
			}
			server, _ = accepted(t, listen, func(address string) net.Conn { return dialAs(t, 65534, address) })
			if uid, ok := peeruid.Of(server); !ok || uid != 65534 {
				t.Errorf("uid %d, known %t; want 65534", uid, ok)
			}
		})
	}
}

// The kernel reports a closed socket as root's.
func TestAClosedSocketHasNoOwner(t *testing.T) {
	t.Parallel()
	server, client := accepted(t, "127.0.0.1:0", func(address string) net.Conn { return dialAs(t, os.Geteuid(), address) })
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	_ = server.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := server.Read(make([]byte, 1)); err == nil {
		t.Fatal("the connection is not closed")
	}
	if uid, ok := peeruid.Of(server); ok {
		t.Errorf("the owner of a closed socket is uid %d", uid)
	}
}
