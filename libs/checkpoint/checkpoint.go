// Package checkpoint saves running processes to folders, and continues them: on this host or on
// another one, once or several times.
//
// A saved process continues with its memory, threads, and open files. Descriptors whose other end
// is outside of the process tree are its streams: a restore connects each to a file of the caller.
// TCP connections are closed; the process sees a reset and connects again.
//
// A process whose limits a restore could not put in force again, as one in a box of
// rollout-sandbox, is refused before it is touched.
package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/rollout-rl/rollout/libs/id"
)

// Reasons of errors.
const (
	ReasonUnavailable = "CHECKPOINT_UNAVAILABLE"  // this host can't save and restore processes
	ReasonNotFound    = "PROCESS_NOT_FOUND"       // there is no such process
	ReasonConfined    = "PROCESS_CONFINED"        // a restore could not put its limits in force
	ReasonDump        = "PROCESS_NOT_SAVED"       // it runs as before
	ReasonRestore     = "PROCESS_NOT_RESTORED"    // nothing of it runs
	ReasonFiles       = "PROCESS_FILES_CHANGED"   // a file that it has open is missing or differs here
	ReasonStreams     = "PROCESS_STREAMS_MISSING" // a stream has no file to be connected to
	ReasonLimits      = "PROCESS_LIMITS_LOST"     // a limit was not in force after the restore
	ReasonImage       = "PROCESS_IMAGE_DAMAGED"   // a file of the image is missing, damaged, or not understood
	ReasonExists      = "PROCESS_IMAGE_EXISTS"    // the folder is not empty
)

// Error says why a process could not be saved or restored.
type Error struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Fix     string `json:"fix,omitempty"`
}

func (e *Error) Error() string { return e.Message }

// Fail makes an Error.
func Fail(reason, fix, format string, args ...any) *Error {
	return &Error{Reason: reason, Fix: fix, Message: fmt.Sprintf(format, args...)}
}

// Checkpointer saves and restores processes.
type Checkpointer interface {
	// Probe saves and restores a small process, and reports whether that works here.
	Probe(ctx context.Context) Report
	// Dump saves a process and its descendants to a folder, which must not exist or be empty. The
	// folder appears when it is complete. The processes end, unless keep: then they continue.
	// *Error if they could not be saved; they continue then, too.
	Dump(ctx context.Context, pid int, dir string, keep bool) (Image, error)
	// Restore continues the processes of a folder, which is not changed. They have their own process
	// ids and see no other process; they end when Process.Kill is called, or this process ends.
	Restore(ctx context.Context, dir string, o Restore) (Process, error)
}

// Restore says where processes continue.
type Restore struct {
	// Streams are the files that take the place of the streams, by Stream.ID. Restore duplicates them.
	Streams map[string]*os.File
	// Network is the path of the network namespace to continue in; empty: that of the caller.
	Network string
}

// Process is a restored process.
type Process interface {
	// PID is the id of the first process on this host.
	PID() int
	// Wait returns the exit code of the first process once all of them have ended; 128 and the number
	// of the signal if one ended it.
	Wait() int
	// Kill ends all of them.
	Kill()
}

// Report is whether a host can save and restore processes.
type Report struct {
	OK      bool    `json:"ok"`
	Program string  `json:"program,omitempty"`
	Version string  `json:"version,omitempty"`
	Seconds float64 `json:"seconds,omitempty"` // to save and restore the process of the probe
	Error   *Error  `json:"error,omitempty"`   // why not
}

// Image describes the processes of a folder.
type Image struct {
	Format    int      `json:"format"` // 1
	Host      Host     `json:"host"`
	Processes []Task   `json:"processes"` // the first one is the root of the others
	Streams   []Stream `json:"streams,omitempty"`
	Files     []File   `json:"files"`
}

// Host is where an image was made.
type Host struct {
	Kernel string `json:"kernel"`
	Arch   string `json:"arch"`
	By     string `json:"by"` // the program and its version
}

// Task is a process of an image, and the limits that are checked after a restore.
type Task struct {
	PID     int               `json:"pid"` // as the process sees it
	Command []string          `json:"command"`
	Limits  map[string]string `json:"limits"` // by their names in /proc/PID/status and /proc/PID/limits
}

// Stream is a connection to a process outside of the tree.
type Stream struct {
	ID          string `json:"id"`
	Kind        string `json:"kind"`        // socket, pipe, file, or terminal
	Descriptors []int  `json:"descriptors"` // of the first process that has it
}

// File is a file of an image.
type File struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	Digest string `json:"digest"` // content id
}

// Manifest is the name of the file that describes the image of a folder.
const Manifest = "process.json"

const format = 1

// Stream returns the stream with a descriptor of the first process.
func (m Image) Stream(descriptor int) (Stream, bool) {
	i := slices.IndexFunc(m.Streams, func(s Stream) bool { return slices.Contains(s.Descriptors, descriptor) })
	if i < 0 {
		return Stream{}, false
	}
	return m.Streams[i], true
}

// Write describes the files of a folder in its manifest. What it wrote is on disk when it returns.
func Write(dir string, m Image) (Image, error) {
	m.Format, m.Files = format, nil
	entries, err := os.ReadDir(dir)
	if err != nil {
		return m, err
	}
	for _, entry := range entries {
		file, err := digest(filepath.Join(dir, entry.Name()))
		if err != nil {
			return m, err
		}
		m.Files = append(m.Files, file)
	}
	raw, err := json.MarshalIndent(m, "", " ")
	if err != nil {
		return m, err
	}
	f, err := os.OpenFile(filepath.Join(dir, Manifest), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return m, err
	}
	_, err = f.Write(append(raw, '\n'))
	return m, errors.Join(err, f.Sync(), f.Close())
}

func digest(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	content, size, err := id.ContentOf(f)
	return File{Name: filepath.Base(path), Bytes: size, Digest: content}, errors.Join(err, f.Sync())
}

// Read returns the manifest of a folder. *Error if it is missing or not understood.
func Read(dir string) (Image, error) {
	raw, err := os.ReadFile(filepath.Join(dir, Manifest))
	if errors.Is(err, fs.ErrNotExist) {
		return Image{}, Fail(ReasonImage, "name the folder that `rollout process dump` wrote", "%s has no %s", dir, Manifest)
	}
	if err != nil {
		return Image{}, Fail(ReasonImage, "", "the manifest of the image can't be read: %v", err)
	}
	return Parse(raw, filepath.Join(dir, Manifest))
}

// Parse returns the manifest that is in a file. *Error if it is not understood.
func Parse(raw []byte, path string) (Image, error) {
	var m Image
	if err := json.Unmarshal(raw, &m); err != nil {
		return Image{}, Fail(ReasonImage, "take the image from its source again", "%s is damaged: %v", path, err)
	}
	if m.Format != format || len(m.Processes) == 0 {
		return Image{}, Fail(ReasonImage, "restore it with the version of rollout that made it", "%s has format %d; this version reads %d", path, m.Format, format)
	}
	return m, nil
}

// Verify reads every file of a folder. *Error names the first one that is not as it was written.
func Verify(dir string, m Image) error {
	for _, want := range m.Files {
		if !filepath.IsLocal(want.Name) || filepath.Base(want.Name) != want.Name {
			return Fail(ReasonImage, "take the image from its source again", "%s of the image is not the name of a file", want.Name)
		}
		got, err := digest(filepath.Join(dir, want.Name))
		if err != nil {
			return Fail(ReasonImage, "take the image from its source again", "%s of the image can't be read: %v", want.Name, err)
		}
		if got != want {
			return Fail(ReasonImage, "take the image from its source again", "%s of the image is damaged: %d bytes with %s, and %d with %s were written", want.Name, got.Bytes, got.Digest, want.Bytes, want.Digest)
		}
	}
	return nil
}

// Connect checks that every stream of an image has a file.
func (m Image) Connect(streams map[string]*os.File) error {
	for _, s := range m.Streams {
		if streams[s.ID] == nil {
			return Fail(ReasonStreams, "connect it: `rollout process restore --connect DESCRIPTOR=OURS`",
				"the %s at descriptor %v of the process is not connected", s.Kind, s.Descriptors)
		}
	}
	return nil
}
