package keeper

import (
	"encoding/json"
	"net"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
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
