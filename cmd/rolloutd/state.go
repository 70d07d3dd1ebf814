package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/config"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Files of the state folder, in addition to rolloutd.json.
func tokenFile(state string) string   { return filepath.Join(state, "token") }
func natsDir(state string) string     { return filepath.Join(state, "nats") }
func segmentDir(state string) string  { return filepath.Join(state, "segments") }
func artifactDir(state string) string { return filepath.Join(state, "artifacts") }
func portsFile(state string) string   { return filepath.Join(state, "ports.json") }

var (
	errFolder = rpcerr.New(codes.FailedPrecondition, "ROLLOUTD_STATE_FOLDER", "the state folder cannot be used").
			Fix("make the folder writable for the user of rolloutd, or choose another one with --state-dir")
	errLocked = rpcerr.New(codes.FailedPrecondition, "ROLLOUTD_STATE_IN_USE", "another rolloutd uses the state folder").
			Fix("stop the other one, or use another --state-dir")
)

// lockState creates the state folder and locks it until unlock is called or the process dies.
func lockState(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, errFolder.WithMessage("create the state folder").Wrap(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "rolloutd.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errFolder.WithMessage("lock the state folder").Wrap(err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	for n := 0; n < 10 && errors.Is(err, syscall.EWOULDBLOCK); n++ { // `rollout` locks it briefly to test whether it is locked
		<-time.After(10 * time.Millisecond)
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err != nil {
		owner := make([]byte, 16)
		n, _ := f.Read(owner)
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errLocked.WithMessage("another rolloutd (pid %s) uses the state folder %s; stop it, or use another --state-dir",
				strings.TrimSpace(string(owner[:n])), dir)
		}
		return nil, fmt.Errorf("lock the state folder: %w", err)
	}
	_ = f.Truncate(0)
	_, _ = f.WriteString(strconv.Itoa(os.Getpid()) + "\n") // for the message above
	// A killed process has left its runtime file.
	if err := os.Remove(config.RuntimeFile(dir)); err != nil && !errors.Is(err, os.ErrNotExist) {
		f.Close()
		return nil, fmt.Errorf("remove a stale runtime file: %w", err)
	}
	return func() { f.Close() }, nil
}

// lastPort returns the port that the previous rolloutd of this folder used for a listener; 0 if
// none.
func lastPort(state, name string) int {
	data, err := os.ReadFile(portsFile(state))
	if err != nil {
		return 0
	}
	var ports map[string]int
	if json.Unmarshal(data, &ports) != nil {
		return 0
	}
	return ports[name]
}

// savePorts stores the ports of the listeners for the next start.
func savePorts(state string, r config.Runtime) error {
	ports := map[string]int{}
	for name, address := range map[string]string{"grpc": r.GRPC, "nats": hostOf(r.NATS), "consul": strings.TrimPrefix(r.Consul, "https://"), "gateway": hostOf(r.Gateway)} {
		if _, p, err := net.SplitHostPort(address); err == nil {
			if n, err := strconv.Atoi(p); err == nil {
				ports[name] = n
			}
		}
	}
	data, err := json.Marshal(ports)
	if err != nil {
		return err
	}
	if err := os.WriteFile(portsFile(state), data, 0o600); err != nil { // an incomplete file is ignored
		return fmt.Errorf("save ports: %w", err)
	}
	return nil
}

// hostOf returns the host:port of a URL.
func hostOf(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return ""
	}
	return u.Host
}
