package daemon

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rollout-rl/rollout/libs/exit"
)

// Stop makes the daemon drain and waits until it has exited; with hard it skips the drain. It
// returns nil if no daemon is running.
func Stop(ctx context.Context, stateDir string, timeout time.Duration, hard bool) (*Info, error) {
	info, err := Find(stateDir)
	if info == nil || err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for n := 0; alive(info.PID); n++ {
		// The second signal ends the drain. It is repeated because it is lost if the daemon has not
		// handled the first one yet: signals of a kind are not queued.
		if n == 0 || hard && n%10 == 0 {
			if err := syscall.Kill(info.PID, syscall.SIGTERM); err != nil && alive(info.PID) {
				return info, fmt.Errorf("signal rolloutd (pid %d): %w", info.PID, err)
			}
		}
		if err := wait(ctx, poll); err != nil {
			return info, exit.New(exit.Unavailable, "run `rollout daemon stop --now`", "rolloutd (pid %d) is still draining after %v", info.PID, timeout)
		}
	}
	return info, nil
}
