package daemon

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/exit"
)

// Stop asks the daemon to drain and waits until it is gone; with hard it does not wait for the drain. It returns nil where
// there is none.
func Stop(ctx context.Context, stateDir string, patience time.Duration, hard bool) (*Info, error) {
	info, err := Find(stateDir)
	if info == nil || err != nil {
		return nil, err
	}
	signals := []syscall.Signal{syscall.SIGTERM}
	if hard {
		signals = append(signals, syscall.SIGTERM) // the second one ends the drain
	}
	for i, signal := range signals {
		if i > 0 { // the kernel keeps one signal of a kind
			_ = wait(ctx, 10*poll)
		}
		if err := syscall.Kill(info.PID, signal); err != nil && alive(info.PID) {
			return info, fmt.Errorf("signal rolloutd (pid %d): %w", info.PID, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for alive(info.PID) {
		if err := wait(ctx, poll); err != nil {
			return info, exit.New(exit.Unavailable, "run `rollout daemon stop --now`", "rolloutd (pid %d) still drains after %v", info.PID, patience)
		}
	}
	return info, nil
}
