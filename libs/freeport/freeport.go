// Package freeport gives tests ports for servers that can't choose a free port themselves ("port
// 0").
//
// A port that is free now may be in use when the server binds it. Two rules prevent that. The port
// is below those that systems assign to connections and to listeners on port 0 (32768 and up on
// Linux, 49152 elsewhere). And this process holds a lock on a file with the port's number until it
// ends, so that concurrent test binaries never get the same port.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

const first, count = 15000, 17000

var (
	mu    sync.Mutex
	taken = map[int]*os.File{} // their locks end with the process
)

// Take reserves n different ports of the loopback interface for this process.
func Take(n int) ([]int, error) {
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("rollout-ports-%d", os.Getuid()))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	mu.Lock()
	defer mu.Unlock()
	start := rand.IntN(count)
	var ports []int
	for i := 0; i < count && len(ports) < n; i++ {
		port := first + (start+i)%count
		if taken[port] != nil {
			continue
		}
		lock, err := reserve(filepath.Join(dir, strconv.Itoa(port)))
		if err != nil {
			return nil, err
		}
		if lock == nil {
			continue
		}
		if listener, err := net.Listen("tcp", fmt.Sprintf(":%d", port)); err != nil {
			lock.Close()
			continue
		} else {
			listener.Close()
		}
		taken[port] = lock
		ports = append(ports, port)
	}
	if len(ports) < n {
		return nil, fmt.Errorf("no %d free ports from %d to %d", n, first, first+count-1)
	}
	return ports, nil
}

// reserve locks a file; nil if another process holds the lock.
func reserve(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		file.Close()
		if err == syscall.EWOULDBLOCK {
			return nil, nil
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return file, nil
}
