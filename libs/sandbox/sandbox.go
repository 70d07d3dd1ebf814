// Package sandbox runs commands that no one trusts: tools of agents, reward functions, judges.
//
// A Box is a set of namespaces with a separate root, a separate network, and limits. Its first
// process (init) starts commands; each command passes a stage that applies Landlock, rlimits, and
// seccomp to itself and then executes the command. Closing a box kills all of its processes and
// removes its files. A box is never reused for another user.
//
// A limit is enforced, or the box is refused before anything runs; Probe reports how this host
// enforces each of them.
package sandbox

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"
)

// Reasons for the end of a command.
const (
	Exited       = "EXITED"          // the command exited by itself, with any code
	Signaled     = "SIGNALED"        // a signal ended the command, and no limit explains it
	Denied       = "DENIED"          // the command failed after a system call was denied
	Killed       = "KILLED"          // the caller ended the command
	LimitWall    = "LIMIT_WALL_TIME" // the command and its processes were killed at wall_time_s
	LimitMemory  = "LIMIT_MEMORY"    // a process was killed at memory_bytes
	LimitPids    = "LIMIT_PIDS"      // the command failed after a process could not be created
	LimitOutput  = "LIMIT_OUTPUT"    // the command was killed when it wrote more than output_bytes
	LimitDisk    = "LIMIT_DISK"      // the command failed after the box's disk was full
	ReasonLost   = "BOX_LOST"        // the box ended while the command ran
	ReasonNoBox  = "BOX_NOT_FOUND"   // no open box or process has this id
	ReasonSpec   = "INVALID_SPEC"
	ReasonLimit  = "LIMIT_NOT_ENFORCEABLE"
	ReasonHost   = "ISOLATION_UNAVAILABLE"
	ReasonStart  = "START_FAILED"
	ReasonNoFile = "COMMAND_NOT_FOUND"
	ReasonSystem = "UNSUPPORTED_PLATFORM"
	ReasonFrame  = "INVALID_REQUEST"
)

// Error is a refusal or a failure of the sandbox itself, never of the command.
type Error struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Fix     string `json:"fix,omitempty"`
}

func (e *Error) Error() string {
	if e.Fix == "" {
		return e.Message
	}
	return e.Message + "; " + e.Fix
}

func fail(reason, fix, format string, args ...any) *Error {
	return &Error{Reason: reason, Fix: fix, Message: fmt.Sprintf(format, args...)}
}

// Data is bytes that JSON shows as a string if they are valid UTF-8, else as {"base64": "..."}.
type Data []byte

// MarshalJSON implements json.Marshaler.
func (d Data) MarshalJSON() ([]byte, error) {
	if utf8.Valid(d) {
		var out bytes.Buffer
		encoder := json.NewEncoder(&out)
		encoder.SetEscapeHTML(false)
		err := encoder.Encode(string(d))
		return bytes.TrimRight(out.Bytes(), "\n"), err
	}
	return json.Marshal(map[string][]byte{"base64": d})
}

// UnmarshalJSON implements json.Unmarshaler.
func (d *Data) UnmarshalJSON(raw []byte) error {
	if len(raw) > 0 && raw[0] == '{' {
		var boxed struct {
			Base64 []byte `json:"base64"`
		}
		err := json.Unmarshal(raw, &boxed)
		*d = boxed.Base64
		return err
	}
	var text string
	err := json.Unmarshal(raw, &text)
	*d = []byte(text)
	return err
}

// Bind shows a file or a folder of the host in the box.
type Bind struct {
	Source   string `json:"source"`           // absolute path on the host
	Target   string `json:"target,omitempty"` // absolute path in the box; the source if empty
	Writable bool   `json:"writable,omitempty"`
}

// Limits of a box. 0 is the default of DefaultLimits, except CPUs, which is unlimited.
type Limits struct {
	WallTimeS   float64 `json:"wall_time_s,omitempty"`  // of each command
	MemoryBytes int64   `json:"memory_bytes,omitempty"` // of all processes together, files in the box included
	Pids        int     `json:"pids,omitempty"`         // processes and threads of all commands
	CPUs        float64 `json:"cpus,omitempty"`         // CPU seconds per second
	OutputBytes int64   `json:"output_bytes,omitempty"` // of each command, stdout and stderr together
	DiskBytes   int64   `json:"disk_bytes,omitempty"`   // of /home/sandbox, /tmp, and /dev/shm together
	OpenFiles   int     `json:"open_files,omitempty"`   // of each process
}

// DefaultLimits apply where a spec names none.
var DefaultLimits = Limits{
	WallTimeS: 60, MemoryBytes: 512 << 20, Pids: 128, OutputBytes: 1 << 20, DiskBytes: 128 << 20, OpenFiles: 1024,
}

// Names of what a probe reports and of what `best_effort` accepts (the limits alone).
const (
	Memory = "memory_bytes"
	Pids   = "pids"
	CPUs   = "cpus"
)

// NetworkNone is a network with only a loopback device, NetworkHost that of the host.
const (
	NetworkNone = "none"
	NetworkHost = "host"
)

// Spec describes a box.
type Spec struct {
	Binds      []Bind   `json:"binds,omitempty"`   // in addition to the system's programs and libraries
	Network    string   `json:"network,omitempty"` // NetworkNone (default) or NetworkHost
	Limits     Limits   `json:"limits,omitzero"`
	BestEffort []string `json:"best_effort,omitempty"` // limits that may be unenforced: memory_bytes, pids, cpus
}

// File is a file that is written before the command starts.
type File struct {
	Path    string `json:"path"` // absolute, or relative to the working directory
	Content Data   `json:"content"`
	Mode    uint32 `json:"mode,omitempty"` // 0644 if 0
}

// Command is what runs in a box.
type Command struct {
	Argv  []string          `json:"argv"`
	Env   map[string]string `json:"env,omitempty"` // in addition to PATH, HOME, TMPDIR, LANG, USER; nothing is inherited
	Cwd   string            `json:"cwd,omitempty"` // /home/sandbox if empty
	Stdin Data              `json:"stdin,omitempty"`
	Files []File            `json:"files,omitempty"`

	WallTimeS   float64 `json:"wall_time_s,omitempty"`  // instead of the box's
	OutputBytes int64   `json:"output_bytes,omitempty"` // instead of the box's

	// KeepBackground keeps processes that the command leaves running; by default they are killed.
	KeepBackground bool `json:"keep_background,omitempty"`
}

// Denial counts the denied calls of one system call.
type Denial struct {
	Syscall string `json:"syscall"`
	Count   int    `json:"count"`
}

// Result is the end of a command.
type Result struct {
	Reason          string   `json:"reason"`
	ExitCode        int      `json:"exit_code"` // -1 if a signal ended the command
	Signal          string   `json:"signal,omitempty"`
	Stdout          Data     `json:"stdout"`
	Stderr          Data     `json:"stderr"`
	StdoutTruncated bool     `json:"stdout_truncated,omitempty"`
	StderrTruncated bool     `json:"stderr_truncated,omitempty"`
	LimitsHit       []string `json:"limits_hit,omitempty"` // every limit reached, also if the command succeeded
	Denied          []Denial `json:"denied,omitempty"`     // system calls that returned EPERM
	WallTimeS       float64  `json:"wall_time_s"`
	CPUTimeS        float64  `json:"cpu_time_s"`
	MemoryPeakBytes int64    `json:"memory_peak_bytes"` // of the box with cgroups, else of the largest process
	StartS          float64  `json:"start_s"`           // until the command was executed
}

// fill sets defaults and checks what needs no host.
func (s Spec) fill() (Spec, error) {
	if s.Network == "" {
		s.Network = NetworkNone
	}
	if s.Network != NetworkNone && s.Network != NetworkHost {
		return s, fail(ReasonSpec, "use none or host", "network: %q is not known", s.Network)
	}
	d, l := DefaultLimits, &s.Limits
	for _, limit := range []struct {
		name       string
		set        func()
		value, min float64
	}{
		{"wall_time_s", func() { l.WallTimeS = d.WallTimeS }, l.WallTimeS, 0.001},
		{Memory, func() { l.MemoryBytes = d.MemoryBytes }, float64(l.MemoryBytes), 4 << 20},
		{Pids, func() { l.Pids = d.Pids }, float64(l.Pids), 1},
		{CPUs, func() {}, l.CPUs, 0.01},
		{"output_bytes", func() { l.OutputBytes = d.OutputBytes }, float64(l.OutputBytes), 1},
		{"disk_bytes", func() { l.DiskBytes = d.DiskBytes }, float64(l.DiskBytes), 64 << 10},
		{"open_files", func() { l.OpenFiles = d.OpenFiles }, float64(l.OpenFiles), 8},
	} {
		if limit.value == 0 {
			limit.set()
		} else if limit.value < limit.min {
			return s, fail(ReasonSpec, "raise it, or leave it out for the default", "limits.%s: %v is below the minimum %v", limit.name, limit.value, limit.min)
		}
	}
	for _, name := range s.BestEffort {
		if !slices.Contains([]string{Memory, Pids, CPUs}, name) {
			return s, fail(ReasonSpec, "name any of memory_bytes, pids, cpus", "best_effort: %q is not a limit that a host may lack", name)
		}
	}
	s.Binds = slices.Clone(s.Binds)
	for i := range s.Binds {
		b := &s.Binds[i]
		if b.Target == "" {
			b.Target = b.Source
		}
		if !filepath.IsAbs(b.Source) || !filepath.IsAbs(b.Target) {
			return s, fail(ReasonSpec, "give absolute paths", "binds[%d]: %q to %q is not absolute", i, b.Source, b.Target)
		}
		b.Target = filepath.Clean(b.Target)
		for _, own := range []string{"/", "/proc", "/dev", "/etc"} {
			if b.Target == own {
				return s, fail(ReasonSpec, "bind it elsewhere, or bind single entries", "binds[%d]: the box has its own %s", i, own)
			}
		}
		if strings.HasPrefix(b.Target, "/proc/") {
			return s, fail(ReasonSpec, "bind it elsewhere", "binds[%d]: %s is in the box's /proc", i, b.Target)
		}
	}
	slices.SortStableFunc(s.Binds, func(a, b Bind) int { return strings.Count(a.Target, "/") - strings.Count(b.Target, "/") })
	return s, nil
}

// fill sets the defaults of a command in a box.
func (c Command) fill(limits Limits) (Command, error) {
	if len(c.Argv) == 0 || c.Argv[0] == "" {
		return c, fail(ReasonSpec, `give a program and its arguments, as in ["python3", "-c", "print(1)"]`, "argv is empty")
	}
	for _, text := range c.Argv {
		if strings.ContainsRune(text, 0) {
			return c, fail(ReasonSpec, "remove it", "argv contains a NUL character")
		}
	}
	if c.Cwd == "" {
		c.Cwd = home
	}
	if !filepath.IsAbs(c.Cwd) {
		return c, fail(ReasonSpec, "give an absolute path in the box", "cwd: %q is not absolute", c.Cwd)
	}
	env := map[string]string{
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME": home, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "sandbox",
	}
	for name, value := range c.Env {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return c, fail(ReasonSpec, "use a name without = and NUL", "env: %q is not a valid variable", name)
		}
		env[name] = value
	}
	c.Env = env
	if c.WallTimeS < 0 || c.OutputBytes < 0 {
		return c, fail(ReasonSpec, "give a positive number", "wall_time_s or output_bytes of the command is negative")
	}
	if c.WallTimeS == 0 {
		c.WallTimeS = limits.WallTimeS
	}
	if c.OutputBytes == 0 {
		c.OutputBytes = limits.OutputBytes
	}
	return c, nil
}

// home is the working directory of commands, empty in a new box.
const home = "/home/sandbox"

// Job is a command and the box it runs in, as one JSON object.
type Job struct {
	Spec
	Command
}
