//go:build linux

package main

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func TestACanceledOpenLeavesNoBox(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("pgrep"); err != nil {
		t.Skip("this host has no pgrep")
	}
	eachUser(t, func(t *testing.T, c *client) {
		number := c.sequence + 1
		answer := make(chan error, 1)
		go func() { answer <- c.call("open", map[string]any{"spec": spec()}, nil) }()
		for sent := false; !sent; {
			c.mu.Lock()
			sent = c.sequence == number
			c.mu.Unlock()
		}
		c.must("cancel", map[string]any{"request": number}, nil)
		if err := <-answer; err == nil {
			t.Error("the canceled open returned a box")
		}
		children := func() string {
			out, _ := exec.Command("pgrep", "-P", fmt.Sprint(c.cmd.Process.Pid)).Output()
			return strings.TrimSpace(string(out))
		}
		for deadline := time.Now().Add(5 * time.Second); children() != "" && time.Now().Before(deadline); {
			<-time.After(20 * time.Millisecond)
		}
		if left := children(); left != "" {
			t.Errorf("processes %s of the box are left", left)
		}
	})
}
