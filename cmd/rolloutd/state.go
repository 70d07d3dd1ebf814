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

// The layout of the state folder, beside rolloutd.json.
func tokenFile(state string) string   { return filepath.Join(state, "token") }
func keysFile(state string) string    { return filepath.Join(state, "api-keys.json") }
func natsDir(state string) string     { return filepath.Join(state, "nats") }
func segmentDir(state string) string  { return filepath.Join(state, "segments") }
func artifactDir(state string) string { return filepath.Join(state, "artifacts") }
func portsFile(state string) string   { return filepath.Join(state, "ports.json") }

var (
	errFolder = rpcerr.New(codes.FailedPrecondition, "ROLLOUTD_STATE_FOLDER", "the state folder can't be used").
			Fix("give rolloutd's user the folder, or name another one with --state-dir")
	errLocked = rpcerr.New(codes.FailedPrecondition, "ROLLOUTD_STATE_IN_USE", "another rolloutd owns the state folder").
			Fix("stop the other one, or give this one another --state-dir")
)

// lockState makes the state folder and owns it until unlock. The kernel lets go of the lock when the process dies.
func lockState(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, errFolder.WithMessage("make the state folder").Wrap(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "rolloutd.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errFolder.WithMessage("lock the state folder").Wrap(err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	for n := 0; n < 10 && errors.Is(err, syscall.EWOULDBLOCK); n++ { // `rollout` holds it for a moment to see whether anybody does
		<-time.After(10 * time.Millisecond)
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err != nil {
		owner := make([]byte, 16)
		n, _ := f.Read(owner)
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errLocked.WithMessage("another rolloutd (pid %s) owns the state folder %s; stop it, or give this one another --state-dir",
				strings.TrimSpace(string(owner[:n])), dir)
		}
		return nil, fmt.Errorf("lock the state folder: %w", err)
	}
	_ = f.Truncate(0)
	_, _ = f.WriteString(strconv.Itoa(os.Getpid()) + "\n") // who it is, for the message above
	// What a killed process left says that it serves; it does not.
	if err := os.Remove(config.RuntimeFile(dir)); err != nil && !errors.Is(err, os.ErrNotExist) {
		f.Close()
		return nil, fmt.Errorf("remove a stale runtime file: %w", err)
	}
	return func() { f.Close() }, nil
}

// rememberedPort is the port that the last rolloutd of this folder had for a listener, 0 where there was none.
func rememberedPort(state, name string) int {
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

// rememberPorts keeps the ports of the listeners for the next start.
func rememberPorts(state string, r config.Runtime) error {
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
	if err := os.WriteFile(portsFile(state), data, 0o600); err != nil { // half of a file counts as none
		return fmt.Errorf("remember ports: %w", err)
	}
	return nil
}

// hostOf is the host:port of an URL.
func hostOf(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return ""
	}
	return u.Host
}
