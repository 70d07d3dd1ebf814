package freeport_test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"

	"github.com/rollout-rl/rollout/libs/freeport"
)

const inChild = "FREEPORT_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(inChild) != "" {
		ports, err := freeport.Take(200)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		for _, port := range ports {
			fmt.Println(port)
		}
		_, _ = os.Stdin.Read(make([]byte, 1)) // keeps the ports until the parent exits
		return
	}
	os.Exit(m.Run())
}

// Concurrent processes never get the same port, although none of them listens on it.
func TestProcessesNeverShareAPort(t *testing.T) {
	const processes = 8
	owner := map[string]int{}
	for i := range processes {
		child := exec.CommandContext(t.Context(), os.Args[0])
		child.Env = append(os.Environ(), inChild+"=1")
		child.Stderr = os.Stderr
		stdin, err := child.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { stdin.Close(); _ = child.Wait() })
		lines := bufio.NewScanner(stdout)
		for n := 0; n < 200 && lines.Scan(); n++ {
			if other, ok := owner[lines.Text()]; ok {
				t.Fatalf("processes %d and %d both got port %s", other, i, lines.Text())
			}
			owner[lines.Text()] = i
		}
	}
	if len(owner) != 200*processes {
		t.Fatalf("%d ports, want %d", len(owner), 200*processes)
	}
}

// One that another program listens on is not given out.
func TestPortsCanBeListenedOn(t *testing.T) {
	ports, err := freeport.Take(20)
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range ports {
		listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Error(err)
			continue
		}
		listener.Close()
	}
}
