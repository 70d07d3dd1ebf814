package daemon

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/libs/exit"
)

// Stop asks the daemon to drain and waits until it is gone; with hard it does not wait for the drain. It returns nil where
// there is none.
func Stop(ctx context.Context, stateDir string, patience time.Duration, hard bool) (*Info, error) {
	info, err := Find(stateDir)
	if info == nil || err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for n := 0; alive(info.PID); n++ {
		// The second signal ends the drain. It is sent until the daemon has gone: one that comes before a busy daemon has taken
		// the first is lost, for the kernel keeps one signal of a kind.
		if n == 0 || hard && n%10 == 0 {
			if err := syscall.Kill(info.PID, syscall.SIGTERM); err != nil && alive(info.PID) {
				return info, fmt.Errorf("signal rolloutd (pid %d): %w", info.PID, err)
			}
		}
		if err := wait(ctx, poll); err != nil {
			return info, exit.New(exit.Unavailable, "run `rollout daemon stop --now`", "rolloutd (pid %d) still drains after %v", info.PID, patience)
		}
	}
	return info, nil
}
