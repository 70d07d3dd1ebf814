package rpc_test

import (
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/rpc"
)

// A server accepts some MiB of a call before flow control blocks the caller: the first frame sets
// the window, and it never shrinks.
func TestACallerNeedNotWaitForAWindow(t *testing.T) {
	t.Parallel()
	s, err := rpc.NewServer(rpc.ServerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	address, err := s.Listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	wait.Go(func() {
		if err := s.Run(t.Context()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(wait.Wait) // the context has ended then
	conn, err := net.Dial("tcp", address.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, preface+noSettings); err != nil {
		t.Fatal(err)
	}
	wide(t, conn)
}

// A client accepts some MiB too, and with a fixed window: gRPC would send a ping for each token of
// a stream to measure one.
func TestAWorkerNeedNotWaitForAWindow(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := rpc.NewDialer(rpc.DialerOptions{}).Dial(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	client.Connect()
	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.ReadFull(conn, make([]byte, len(preface))); err != nil {
		t.Fatal(err)
	}
	wide(t, conn)
}

const preface, noSettings = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// wide fails the test unless the first frames set wide windows.
func wide(t *testing.T, conn net.Conn) {
	t.Helper()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	const settings, windowUpdate, initialWindow, entryBytes = 4, 8, 4, 6
	head := make([]byte, len(noSettings))
	if _, err := io.ReadFull(conn, head); err != nil || head[3] != settings {
		t.Fatalf("first frame %x: %v", head, err)
	}
	entries := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
	if _, err := io.ReadFull(conn, entries); err != nil {
		t.Fatal(err)
	}
	window := uint32(0)
	for ; len(entries) >= entryBytes; entries = entries[entryBytes:] {
		if binary.BigEndian.Uint16(entries) == initialWindow {
			window = binary.BigEndian.Uint32(entries[2:])
		}
	}
	if window < 1<<20 {
		t.Errorf("the peer may send %d bytes", window)
	}
	more := make([]byte, len(head)+4) // of the connection, beyond HTTP/2's own
	if _, err := io.ReadFull(conn, more); err != nil || more[3] != windowUpdate {
		t.Fatalf("second frame %x: %v", more, err)
	}
	if add := binary.BigEndian.Uint32(more[len(head):]); add < 1<<20 {
		t.Errorf("calls may send %d bytes more together", add)
	}
}
