//go:build crashpoint

package crashpoint

import (
	"os"
	"os/signal"
	"strings"
	"syscall"
)

// Here kills or suspends the process where that was asked for.
func Here(name string) {
	path := os.Getenv("ROLLOUT_CRASH_FILE")
	if path == "" {
		return
	}
	order, err := os.ReadFile(path)
	point, suspend := strings.CutPrefix(strings.TrimSpace(string(order)), "stop ")
	if err != nil || point != name {
		return
	}
	if os.Rename(path, path+".done") != nil {
		return // another process was first
	}
	if suspend {
		continued := make(chan os.Signal, 1)
		signal.Notify(continued, syscall.SIGCONT)
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-continued
		return
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // block until the signal is delivered
}
