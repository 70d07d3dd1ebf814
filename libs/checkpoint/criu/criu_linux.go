// Package criu saves and restores processes with CRIU (https://criu.org), version 4 or newer.
package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rollout-rl/rollout/libs/checkpoint"
)

// Checkpointer implements checkpoint.Checkpointer. It needs root.
type Checkpointer struct {
	program string
	init    []string
}

var _ checkpoint.Checkpointer = (*Checkpointer)(nil)

// New returns a Checkpointer. program is the path of criu; empty: it is not installed. init is a
// command that calls Init.
func New(program string, init ...string) *Checkpointer {
	return &Checkpointer{program: program, init: init}
}

const (
	installFix = "install CRIU 4 or newer: from the packages of the distribution, or with `scripts/criu` of a checkout"
	leastMajor = 4 // 3.17 does not restore on Linux 6
)

// version returns the version of CRIU. *checkpoint.Error if it is missing or too old.
func (c *Checkpointer) version(ctx context.Context) (string, error) {
	if c.program == "" {
		return "", checkpoint.Fail(checkpoint.ReasonUnavailable, installFix, "criu is not installed")
	}
	out, err := exec.CommandContext(ctx, c.program, "--version").Output()
	if err != nil {
		return "", checkpoint.Fail(checkpoint.ReasonUnavailable, installFix, "%s can't be run: %v", c.program, err)
	}
	version := strings.TrimSpace(strings.TrimPrefix(strings.SplitN(string(out), "\n", 2)[0], "Version:"))
	var major int
	if _, err := fmt.Sscanf(version, "%d.", &major); err != nil || major < leastMajor {
		return version, checkpoint.Fail(checkpoint.ReasonUnavailable, installFix, "criu is of version %s; %d or newer is necessary", version, leastMajor)
	}
	return version, nil
}

// ready returns the version, or why this host can't.
func (c *Checkpointer) ready(ctx context.Context) (string, error) {
	version, err := c.version(ctx)
	if err != nil {
		return version, err
	}
	if os.Geteuid() != 0 {
		return version, checkpoint.Fail(checkpoint.ReasonUnavailable, "run it as root", "CRIU saves processes as root; this is user %d", os.Geteuid())
	}
	return version, nil
}

// Probe implements checkpoint.Checkpointer.
func (c *Checkpointer) Probe(ctx context.Context) checkpoint.Report {
	r := checkpoint.Report{Program: c.program}
	began := time.Now()
	var err error
	if r.Version, err = c.ready(ctx); err == nil {
		err = c.check(ctx)
	}
	if err == nil {
		err = c.try(ctx)
	}
	if err != nil {
		if !errors.As(err, &r.Error) {
			r.Error = checkpoint.Fail(checkpoint.ReasonUnavailable, "", "%v", err)
		}
		return r
	}
	r.OK, r.Seconds = true, time.Since(began).Seconds()
	return r
}

// check asks CRIU whether the kernel has what it needs.
func (c *Checkpointer) check(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, c.program, "check").CombinedOutput()
	if err != nil {
		return failure(checkpoint.ReasonUnavailable, "`criu check` failed", string(out), err)
	}
	return nil
}

// try saves a small process and restores it.
func (c *Checkpointer) try(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "rollout-process-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	target := exec.Command("sleep", "60")
	target.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := target.Start(); err != nil {
		return err
	}
	defer func() { _ = target.Process.Kill(); _ = target.Wait() }()
	image := filepath.Join(dir, "image")
	saved, err := c.Dump(ctx, target.Process.Pid, image, true)
	if err != nil {
		return err
	}
	nothing, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer nothing.Close()
	streams := map[string]*os.File{} // it may have inherited some
	for _, s := range saved.Streams {
		streams[s.ID] = nothing
	}
	restored, err := c.Restore(ctx, image, checkpoint.Restore{Streams: streams})
	if err != nil {
		return err
	}
	restored.Kill()
	return nil
}

// Dump implements checkpoint.Checkpointer.
func (c *Checkpointer) Dump(ctx context.Context, pid int, dir string, keep bool) (checkpoint.Image, error) {
	version, err := c.ready(ctx)
	if err != nil {
		return checkpoint.Image{}, err
	}
	image, pids, err := examine(pid)
	if err != nil {
		return image, typed(checkpoint.ReasonDump, err)
	}
	image.Host = hostOf(version)
	if dir, err = filepath.Abs(dir); err != nil {
		return image, err
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return image, checkpoint.Fail(checkpoint.ReasonExists, "name a new folder", "%s is not empty", dir)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return image, typed(checkpoint.ReasonDump, err)
	}
	partial, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(dir)+".partial-")
	if err != nil {
		return image, typed(checkpoint.ReasonDump, err)
	}
	defer os.RemoveAll(partial) // it was renamed unless this failed
	if err := c.dump(ctx, pid, partial, image, keep); err != nil {
		return image, err
	}
	if image, err = finish(partial, dir, image); err == nil {
		err = ctx.Err() // the caller has given up in the meantime
	}
	if keep {
		return image, typed(checkpoint.ReasonDump, err)
	}
	// The processes are stopped: they end if the image is complete, or continue.
	end := unix.SIGKILL
	if err != nil {
		end = unix.SIGCONT
	}
	for _, pid := range pids {
		_ = unix.Kill(pid, end)
	}
	return image, typed(checkpoint.ReasonDump, err)
}

func typed(reason string, err error) error {
	var own *checkpoint.Error
	if err == nil || errors.As(err, &own) {
		return err
	}
	return checkpoint.Fail(reason, "", "%v", err)
}

// examine describes a process and its descendants. *checkpoint.Error if they can't be saved.
func examine(pid int) (checkpoint.Image, []int, error) {
	var image checkpoint.Image
	if _, err := os.Stat(proc(pid)); err != nil || pid <= 1 {
		return image, nil, checkpoint.Fail(checkpoint.ReasonNotFound, "`ps` shows the processes", "process %d does not run", pid)
	}
	pids, err := tree(pid)
	if err != nil {
		return image, nil, err
	}
	for _, pid := range pids {
		task, lines, err := taskOf(pid)
		if err != nil {
			return image, nil, err
		}
		if err := confined(pid, lines); err != nil {
			return image, nil, err
		}
		image.Processes = append(image.Processes, task)
	}
	image.Streams, err = streams(pids)
	return image, pids, err
}

func hostOf(version string) checkpoint.Host {
	var name unix.Utsname
	_ = unix.Uname(&name)
	return checkpoint.Host{Kernel: unix.ByteSliceToString(name.Release[:]), Arch: unix.ByteSliceToString(name.Machine[:]), By: "CRIU " + version}
}

// dump runs CRIU in the namespaces of the process. It does not end with ctx: a CRIU that is killed
// leaves the processes with its code in them, and they crash.
func (c *Checkpointer) dump(ctx context.Context, pid int, dir string, image checkpoint.Image, keep bool) error {
	args := []string{"dump", "--tree", strconv.Itoa(image.Processes[0].PID), "--images-dir", dir, "--log-file", "dump.log", "--tcp-close", "--network-lock", "skip",
		"--file-locks", "--ghost-limit", strconv.Itoa(ghostBytes), "--manage-cgroups=ignore"}
	if keep {
		args = append(args, "--leave-running")
	} else {
		args = append(args, "--leave-stopped")
	}
	for _, s := range image.Streams {
		args = append(args, external(s)...)
	}
	enter := []string{"--target", strconv.Itoa(pid)}
	for kind, flags := range map[string][]string{"net": {"--net"}, "pid": {"--pid", "--mount"}} {
		same, err := sameNamespace(pid, kind)
		if err != nil {
			return typed(checkpoint.ReasonDump, err)
		}
		if !same {
			enter = append(enter, flags...)
		}
	}
	name := c.program
	if len(enter) > 2 {
		args = append(append(enter, "--", c.program), args...)
		name = "nsenter"
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	out, err := exec.CommandContext(context.WithoutCancel(ctx), name, args...).CombinedOutput()
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(dir, "dump.log"))
		return failure(checkpoint.ReasonDump, fmt.Sprintf("process %d was not saved", pid), string(bytes.Join([][]byte{log, out}, nil)), err)
	}
	return nil
}

// ghostBytes is the size of deleted files that are saved with the process.
const ghostBytes = 64 << 20

// finish makes the folder of an image complete and gives it its name.
func finish(partial, dir string, image checkpoint.Image) (checkpoint.Image, error) {
	for _, name := range []string{"dump.log", "stats-dump"} {
		if err := os.Remove(filepath.Join(partial, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return image, err
		}
	}
	image, err := checkpoint.Write(partial, image)
	if err != nil {
		return image, err
	}
	if err := os.Rename(partial, dir); err != nil {
		return image, err
	}
	parent, err := os.Open(filepath.Dir(dir))
	if err != nil {
		return image, err
	}
	return image, errors.Join(parent.Sync(), parent.Close())
}
