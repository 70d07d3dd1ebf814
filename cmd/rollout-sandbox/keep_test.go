//go:build linux

package main

import (
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/sandbox"
)

// eventually waits for a condition, as long as a busy machine may need.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !condition(); <-time.After(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

func TestKeptProcessesEndAtTheWallTimeOfTheirCommand(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		marker := fmt.Sprintf("kept-%d", c.cmd.Process.Pid)
		b := c.open(spec())
		r := b.exec(sandbox.Command{
			Argv: []string{"/bin/sh", "-c", "setsid /opt/escape stubborn " + marker + " > /dev/null 2>&1 & sleep 0.1"}, KeepBackground: true, WallTimeS: 3,
		})
		c.contained(r, sandbox.Exited, "wall_time_s")
		eventually(t, "a kept process did not end at its wall time", func() bool { return !onHost(marker) })
		if r := b.exec(sandbox.Command{Argv: []string{"true"}}); r.Reason != sandbox.Exited {
			t.Errorf("the box is gone: %+v", r)
		}
	})
}

func TestTheMemoryOfKeptProcessesIsLimited(t *testing.T) {
	t.Parallel()
	python(t)
	eachUser(t, func(t *testing.T, c *client) {
		marker := fmt.Sprintf("greedy-%d", c.cmd.Process.Pid)
		code := "import time; time.sleep(1); held = bytearray(256 << 20); time.sleep(60) #" + marker
		b := c.open(spec())
		script := "setsid /usr/bin/python3 -I -S -c '" + code + "' > /dev/null 2>&1 &"
		r := b.exec(sandbox.Command{Argv: []string{"/bin/sh", "-c", script}, KeepBackground: true, WallTimeS: 50})
		c.contained(r, sandbox.Exited, sandbox.Memory)
		eventually(t, "a kept process exceeds the memory of the box", func() bool { return !onHost(marker) })
	})
}

func TestTheOutputOfAStartedCommandEndsWithIt(t *testing.T) {
	t.Parallel()
	eachUser(t, func(t *testing.T, c *client) {
		b := c.open(spec())
		command := sandbox.Command{Argv: []string{"/bin/sh", "-c", "sleep 86396 & echo done"}, KeepBackground: true}
		c.must("start", map[string]any{"box": b.ID, "command": command}, nil)
		within(t, "the end of the command", func() {
			for e := range c.events {
				if e.Result != nil {
					break
				}
			}
		})
	})
}

func TestACanceledStartReturns(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("pgrep"); err != nil {
		t.Skip("this host has no pgrep")
	}
	eachUser(t, func(t *testing.T, c *client) {
		b := c.open(spec())
		out, _ := exec.Command("pgrep", "-P", fmt.Sprint(c.cmd.Process.Pid)).Output()
		first, err := strconv.Atoi(strings.TrimSpace(string(out)))
		if err != nil {
			t.Fatalf("the first process of the box: %q", out)
		}
		if err := syscall.Kill(first, syscall.SIGSTOP); err != nil { // it starts nothing
			t.Fatal(err)
		}
		number := c.sequence + 1
		answer := make(chan error, 1)
		go func() {
			answer <- c.call("start", map[string]any{"box": b.ID, "command": sandbox.Command{Argv: []string{"cat"}}}, nil)
		}()
		eventually(t, "the request was not sent", func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.sequence == number })
		c.must("cancel", map[string]any{"request": number}, nil)
		within(t, "the canceled start", func() {
			if err := <-answer; reasonOf(err) != sandbox.ReasonStart {
				t.Errorf("the start returned %v", err)
			}
		})
	})
}
