package criu

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rollout-rl/rollout/libs/checkpoint"
)

// order is what Init restores.
type order struct {
	Program string            `json:"program"`
	Dir     string            `json:"dir"`
	Work    string            `json:"work"`    // a folder for the log
	Streams []string          `json:"streams"` // of the descriptors from firstStream
	Tasks   []checkpoint.Task `json:"tasks"`
}

// outcome is the answer of Init.
type outcome struct {
	Error *checkpoint.Error `json:"error,omitempty"`
}

// Descriptors of Init: its socket, then the streams.
const (
	socketDescriptor = 3
	firstStream      = 4
)

// Restore implements checkpoint.Checkpointer.
func (c *Checkpointer) Restore(ctx context.Context, dir string, o checkpoint.Restore) (checkpoint.Process, error) {
	if _, err := c.ready(ctx); err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	image, err := checkpoint.Read(dir)
	if err != nil {
		return nil, err
	}
	if host := hostOf(""); host.Arch != image.Host.Arch {
		return nil, checkpoint.Fail(checkpoint.ReasonRestore, "restore it on a host of that architecture", "the process was saved on %s; this host is %s", image.Host.Arch, host.Arch)
	}
	if err := errors.Join(checkpoint.Verify(dir, image)); err != nil {
		return nil, err
	}
	if err := image.Connect(o.Streams); err != nil {
		return nil, err
	}
	work, err := os.MkdirTemp("", "rollout-process-")
	if err != nil {
		return nil, typed(checkpoint.ReasonRestore, err)
	}
	defer os.RemoveAll(work)
	what := order{Program: c.program, Dir: dir, Work: work, Tasks: image.Processes}
	var files []*os.File
	for _, s := range image.Streams {
		what.Streams = append(what.Streams, s.ID)
		files = append(files, o.Streams[s.ID])
	}
	p, err := c.begin(ctx, what, files, o.Network)
	if err != nil {
		return nil, typed(checkpoint.ReasonRestore, err)
	}
	if err := p.find(image.Processes[0].PID); err != nil {
		p.Kill()
		return nil, typed(checkpoint.ReasonRestore, err)
	}
	return p, nil
}

// restored is the tree of processes below an Init.
type restored struct {
	init  *exec.Cmd
	pid   int
	ended chan struct{}
	code  int
}

// begin starts Init and waits for its answer, at most until ctx ends.
func (c *Checkpointer) begin(ctx context.Context, what order, files []*os.File, network string) (*restored, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "init"), os.NewFile(uintptr(pair[1]), "restore")
	defer ours.Close()
	var printed bytes.Buffer
	cmd := exec.Command(c.init[0], c.init[1:]...)
	cmd.Stderr = &printed
	cmd.ExtraFiles = append([]*os.File{theirs}, files...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL, Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	p := &restored{init: cmd, ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The thread lives as long as Init, which the end of the thread would kill, and is not used
		// again, as it may be in another network namespace.
		runtime.LockOSThread()
		err := func() error {
			if network != "" {
				if err := enterNetwork(network); err != nil {
					return checkpoint.Fail(checkpoint.ReasonRestore, "name a namespace, such as /run/netns/NAME", "the network namespace %s can't be entered: %v", network, err)
				}
			}
			return cmd.Start()
		}()
		theirs.Close()
		started <- err
		if err != nil {
			return
		}
		_ = cmd.Wait() // the code says it
		p.code = cmd.ProcessState.ExitCode()
		if s := cmd.ProcessState.Sys().(syscall.WaitStatus); s.Signaled() {
			p.code = 128 + int(s.Signal())
		}
		close(p.ended)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, p.Kill)
	var answer outcome
	err = json.NewEncoder(ours).Encode(what)
	if err == nil {
		err = json.NewDecoder(ours).Decode(&answer)
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err == nil && answer.Error == nil {
		return p, nil
	}
	p.Kill()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if answer.Error != nil {
		return nil, answer.Error
	}
	return nil, fmt.Errorf("the first process of the restored ones ended: %w %s", err, bytes.TrimSpace(printed.Bytes()))
}

// find looks up the id of the first process on this host.
func (p *restored) find(inner int) error {
	pids, err := tree(p.init.Process.Pid)
	if err != nil {
		return err
	}
	for _, pid := range pids[1:] {
		if task, _, err := taskOf(pid); err == nil && task.PID == inner {
			p.pid = pid
			return nil
		}
	}
	return errors.New("the restored process has ended")
}

// PID implements checkpoint.Process.
func (p *restored) PID() int { return p.pid }

// Wait implements checkpoint.Process.
func (p *restored) Wait() int {
	<-p.ended
	return p.code
}

// Kill implements checkpoint.Process.
func (p *restored) Kill() {
	_ = p.init.Process.Kill()
	<-p.ended
}

// Init is the first process of a namespace of process ids. It restores processes, checks that their
// limits are in force, lets them continue, and waits for them. It returns the exit code of the
// first of them.
func Init() int {
	runtime.LockOSThread() // a process that ends with its parent would end with the thread that started CRIU
	unix.CloseOnExec(socketDescriptor)
	conn := os.NewFile(socketDescriptor, "restore")
	var what order
	if err := json.NewDecoder(conn).Decode(&what); err != nil {
		fmt.Fprintln(os.Stderr, "this command is started by `rollout process restore` alone:", err)
		return 64
	}
	err := what.restore()
	var answer outcome
	if err != nil && !errors.As(err, &answer.Error) {
		answer.Error = checkpoint.Fail(checkpoint.ReasonRestore, "", "%v", err)
	}
	if e := json.NewEncoder(conn).Encode(answer); e != nil || err != nil {
		return 1
	}
	conn.Close()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 1
		case pid != what.Tasks[0].PID:
		case status.Signaled():
			return 128 + int(status.Signal())
		case status.Exited():
			return status.ExitStatus()
		}
	}
}

func (o order) restore() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	args := []string{"restore", "--images-dir", o.Dir, "--work-dir", o.Work, "--log-file", "restore.log", "--restore-detached", "--restore-sibling", "--leave-stopped",
		"--tcp-close", "--file-locks", "--manage-cgroups=ignore"}
	cmd := exec.Command(o.Program)
	for i, stream := range o.Streams {
		f := os.NewFile(uintptr(firstStream+i), stream)
		defer f.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
		unix.CloseOnExec(firstStream + i)
		args = append(args, "--inherit-fd", "fd["+strconv.Itoa(socketDescriptor+i)+"]:"+stream)
	}
	cmd.Args = append(cmd.Args, args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		log, _ := os.ReadFile(filepath.Join(o.Work, "restore.log"))
		return failure(checkpoint.ReasonRestore, "the process was not restored", string(log)+string(out), err)
	}
	if unknown, err := o.unknown(); err != nil || len(unknown) > 0 {
		if err != nil {
			return err
		}
		return checkpoint.Fail(checkpoint.ReasonLimits, "save it while it starts no process", "process %d was started while the image was made, so its limits are not known, and nothing was restored", unknown[0])
	}
	for _, was := range o.Tasks {
		is, _, err := taskOf(was.PID)
		if err != nil {
			return err
		}
		if text := lost(was.Limits, is.Limits); text != "" {
			return checkpoint.Fail(checkpoint.ReasonLimits, "restore it on a host that has the limits of the one that saved it", "process %d was restored without its limits, and ended: %s", was.PID, text)
		}
	}
	for _, task := range o.Tasks {
		if err := unix.Kill(task.PID, unix.SIGCONT); err != nil {
			return fmt.Errorf("continue process %d: %w", task.PID, err)
		}
	}
	return nil
}

// unknown returns the restored processes that are not described: those that began between the look
// at the processes and the dump. Processes that have ended do not count.
func (o order) unknown() (found []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		described := func(t checkpoint.Task) bool { return t.PID == pid }
		if err != nil || pid == os.Getpid() || slices.ContainsFunc(o.Tasks, described) {
			continue
		}
		if lines, err := status(pid); err == nil && !strings.HasPrefix(lines["State"], "Z") {
			found = append(found, pid)
		}
	}
	return found, nil
}
