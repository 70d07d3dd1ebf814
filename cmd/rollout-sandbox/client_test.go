//go:build linux

package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/rollout-rl/rollout/libs/sandbox"
)

// programs are the sandbox and the program that tries to escape, built static and readable for all
// users.
type programs struct{ sandbox, escape, dir string }

var built programs

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "rollout-sandbox-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	built = programs{sandbox: filepath.Join(dir, "rollout-sandbox"), escape: filepath.Join(dir, "escape"), dir: dir}
	for path, source := range map[string]string{built.sandbox: ".", built.escape: "./testdata/escape"} {
		if err != nil {
			break
		}
		build := exec.Command("go", "build", "-trimpath", "-o", path, source)
		build.Env, build.Stderr = append(os.Environ(), "CGO_ENABLED=0"), os.Stderr
		err = build.Run()
	}
	code := 1
	if err == nil {
		code = m.Run()
	} else {
		os.Stderr.WriteString("build the programs: " + err.Error() + "\n")
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// users are the uids that the suite runs as: this one, and nobody if this one is root.
func users() map[string]uint32 {
	if os.Geteuid() != 0 {
		return map[string]uint32{"user": uint32(os.Geteuid())}
	}
	return map[string]uint32{"root": 0, "nobody": 65534}
}

// eachUser runs a test as each user whose host can build boxes, and logs why it skips the others.
func eachUser(t *testing.T, test func(t *testing.T, c *client)) {
	t.Helper()
	for name, uid := range users() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := serve(t, uid)
			if !c.report.OK {
				t.Skipf("this host builds no boxes for %s: %s", name, c.report.Error)
			}
			test(t, c)
		})
	}
}

// client speaks the protocol of `rollout-sandbox serve`.
type client struct {
	t      *testing.T
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    io.Reader
	report sandbox.Report

	mu       sync.Mutex
	sequence int64
	waiting  map[int64]chan reply
	events   chan sandbox.Event
}

type reply struct {
	ID     int64           `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *sandbox.Error  `json:"error"`
	Event  *sandbox.Event  `json:"event"`
}

// serve starts a server as a user; the end of the test stops it.
func serve(t *testing.T, uid uint32) *client {
	t.Helper()
	c := &client{t: t, cmd: exec.Command(built.sandbox, "serve"), waiting: map[int64]chan reply{}, events: make(chan sandbox.Event, 1000)}
	c.cmd.Env = append(os.Environ(), "SECRET=secret-of-the-server")
	c.cmd.Stderr = os.Stderr
	c.cmd.Dir = "/"
	if os.Geteuid() == 0 && uid != 0 {
		c.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if c.out, err = c.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		c.read()
	}()
	t.Cleanup(func() {
		c.in.Close()
		<-read
		if c.cmd.ProcessState != nil {
			return // the test ended it
		}
		if err := c.cmd.Wait(); err != nil {
			t.Errorf("rollout-sandbox serve: %v", err)
		}
	})
	c.must("probe", nil, &c.report)
	return c
}

func (c *client) read() {
	for {
		var head [4]byte
		if _, err := io.ReadFull(c.out, head[:]); err != nil {
			break
		}
		body := make([]byte, binary.BigEndian.Uint32(head[:]))
		if _, err := io.ReadFull(c.out, body); err != nil {
			break
		}
		var r reply
		if err := json.Unmarshal(body, &r); err != nil {
			break
		}
		if r.Event != nil {
			c.events <- *r.Event
			continue
		}
		c.mu.Lock()
		c.waiting[r.ID] <- r
		delete(c.waiting, r.ID)
		c.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, one := range c.waiting {
		one <- reply{Error: &sandbox.Error{Reason: "GONE", Message: "the server ended"}}
	}
}

// call makes a request.
func (c *client) call(method string, params, result any) error {
	c.mu.Lock()
	c.sequence++
	id, answer := c.sequence, make(chan reply, 1)
	c.waiting[id] = answer
	raw, err := json.Marshal(params)
	if err == nil {
		raw, err = json.Marshal(sandbox.Request{ID: id, Method: method, Params: raw})
	}
	if err == nil {
		_, err = c.in.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(raw))), raw...))
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	r := <-answer
	if r.Error != nil {
		return r.Error
	}
	if result == nil {
		return nil
	}
	return json.Unmarshal(r.Result, result)
}

func (c *client) must(method string, params, result any) {
	c.t.Helper()
	if err := c.call(method, params, result); err != nil {
		c.t.Fatalf("%s: %v", method, err)
	}
}

// small are limits that bombs reach quickly.
var small = sandbox.Limits{WallTimeS: 30, MemoryBytes: 64 << 20, Pids: 40, OutputBytes: 64 << 10, DiskBytes: 4 << 20}

// spec shows the escape program.
func spec() sandbox.Spec {
	return sandbox.Spec{Limits: small, Binds: []sandbox.Bind{{Source: built.escape, Target: "/opt/escape"}}}
}

// run runs one command in a new box.
func (c *client) run(spec sandbox.Spec, command sandbox.Command) (out sandbox.Result) {
	c.t.Helper()
	c.must("run", sandbox.Job{Spec: spec, Command: command}, &out)
	return out
}

// escape runs an attempt of the escape program in a new box.
func (c *client) escape(args ...string) sandbox.Result {
	c.t.Helper()
	return c.run(spec(), sandbox.Command{Argv: append([]string{"/opt/escape"}, args...)})
}

// shell runs a script in a new box.
func (c *client) shell(script string) sandbox.Result {
	c.t.Helper()
	return c.run(spec(), sandbox.Command{Argv: []string{"/bin/sh", "-c", script}})
}

// box is an open box.
type box struct {
	*client
	ID      string `json:"box"`
	Process string `json:"process"`
}

func (c *client) open(spec sandbox.Spec) *box {
	c.t.Helper()
	b := &box{client: c}
	c.must("open", map[string]any{"spec": spec}, b)
	return b
}

func (b *box) exec(command sandbox.Command) (out sandbox.Result) {
	b.t.Helper()
	b.must("exec", map[string]any{"box": b.ID, "command": command}, &out)
	return out
}

func (b *box) shell(script string) sandbox.Result {
	b.t.Helper()
	return b.exec(sandbox.Command{Argv: []string{"/bin/sh", "-c", script}})
}

// contained checks how an attempt was reported, and logs what contained it.
func (c *client) contained(r sandbox.Result, reason, by string) {
	c.t.Helper()
	if r.Reason != reason {
		raw, _ := json.Marshal(r)
		c.t.Errorf("reason %s, want %s: %.1000s", r.Reason, reason, raw)
	}
	mechanism := c.report.By(by)
	if mechanism == sandbox.None {
		c.t.Errorf("%s is not enforced on this host", by)
	}
	c.t.Logf("contained by %s (%s), reported as %s", by, mechanism, r.Reason)
}

// onHost reports whether a process of the host has a text in its command line.
func onHost(marker string) bool {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range files {
		if raw, err := os.ReadFile(path); err == nil && strings.Contains(string(raw), marker) {
			return true
		}
	}
	return false
}

// groups lists the control groups of a server.
func groups(pid string) []string {
	var out []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, entry os.DirEntry, err error) error {
		if err == nil && entry.IsDir() && strings.HasPrefix(entry.Name(), "rollout-sandbox-"+pid+"-") {
			out = append(out, path)
		}
		return nil
	})
	return out
}

func reasonOf(err error) string {
	var typed *sandbox.Error
	if errors.As(err, &typed) {
		return typed.Reason
	}
	return ""
}
