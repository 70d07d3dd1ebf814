// Package crashtest records what a process writes, and makes each state again that a SIGKILL of it
// can leave.
//
// Record traces the system calls of a process (Linux). A Tree is a folder in memory; States applies
// the recorded operations to it, one after the other, and yields what exists after each of them and
// inside of each write. A write that a SIGKILL interrupts ends at any of its bytes; what the kernel
// has accepted stays. Objects of a bucket (see Bucket) are files below the folder BucketFolder,
// which are created whole.
package crashtest

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// Kind is what an operation does.
type Kind string

// The kinds of operations.
const (
	Create   Kind = "create"   // with Data, if it does not exist
	Write    Kind = "write"    // Data at Offset
	Truncate Kind = "truncate" // to Offset bytes
	Mkdir    Kind = "mkdir"
	Link     Kind = "link"   // of Path to To
	Rename   Kind = "rename" // of Path to To
	Remove   Kind = "remove" // of a file or an empty folder
)

// Op is an operation on a file. Paths are below the recorded folder.
type Op struct {
	Kind     Kind
	Path, To string
	Offset   int64 // bytes
	Data     []byte
}

func (o Op) String() string {
	switch {
	case o.Kind == Write:
		return fmt.Sprintf("write of %d bytes at %d of %s", len(o.Data), o.Offset, o.Path)
	case o.To != "":
		return fmt.Sprintf("%s of %s to %s", o.Kind, o.Path, o.To)
	}
	return fmt.Sprintf("%s of %s", o.Kind, o.Path)
}

// Log collects operations in their order.
type Log struct {
	mu  sync.Mutex
	ops []Op
}

// Add appends an operation.
func (l *Log) Add(op Op) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ops = append(l.ops, op)
}

// Ops returns the operations.
func (l *Log) Ops() []Op {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ops
}

// node is the content of a file, which links share. It is replaced and never changed.
type node struct{ data []byte }

// Tree is a folder in memory.
type Tree struct {
	files   map[string]*node
	folders map[string]bool
}

// Read copies a folder into memory, except files that skip names by their path.
func Read(root string, skip func(path string) bool) (*Tree, error) {
	t := &Tree{files: map[string]*node{}, folders: map[string]bool{}}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		path, err = filepath.Rel(root, path)
		if err != nil || skip(path) {
			return err
		}
		if d.IsDir() {
			t.folders[path] = true
			return nil
		}
		data, err := os.ReadFile(filepath.Join(root, path))
		t.files[path] = &node{data}
		return err
	})
	return t, err
}

// Files returns the contents of the files below a folder, by their path in it. "": of all files.
func (t *Tree) Files(folder string) map[string][]byte {
	if folder != "" {
		folder += "/"
	}
	out := map[string][]byte{}
	for path, n := range t.files {
		if rest, ok := strings.CutPrefix(path, folder); ok {
			out[rest] = n.data
		}
	}
	return out
}

// Make writes a tree to a new folder.
func (t *Tree) Make(root string) error {
	err := os.Mkdir(root, 0o700)
	for _, path := range slices.Sorted(maps.Keys(t.folders)) {
		err = errors.Join(err, os.MkdirAll(filepath.Join(root, path), 0o700))
	}
	made := map[*node]string{}
	for path, n := range t.files {
		path = filepath.Join(root, path)
		if first, ok := made[n]; ok {
			err = errors.Join(err, os.Link(first, path))
			continue
		}
		made[n] = path
		err = errors.Join(err, os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, n.data, 0o600))
	}
	return err
}

// Equal describes the first difference of two trees, "" if there is none.
func (t *Tree) Equal(other *Tree) string {
	for _, path := range slices.Sorted(maps.Keys(t.files)) {
		if found, ok := other.files[path]; !ok || string(found.data) != string(t.files[path].data) {
			return fmt.Sprintf("%s: %d bytes, or others than in the other tree", path, len(t.files[path].data))
		}
	}
	for _, path := range slices.Sorted(maps.Keys(other.files)) {
		if t.files[path] == nil {
			return path + " is only in the other tree"
		}
	}
	return ""
}

func (t *Tree) clone() *Tree { return &Tree{maps.Clone(t.files), maps.Clone(t.folders)} }

// after returns the tree after an operation, of a write only its first bytes.
func (t *Tree) after(op Op, bytes int) *Tree {
	t = t.clone()
	found := t.files[op.Path]
	switch op.Kind {
	case Create:
		if found == nil {
			t.files[op.Path] = &node{op.Data}
		}
	case Mkdir:
		t.folders[op.Path] = true
	case Write:
		if found == nil {
			break // it was removed while the process had it open
		}
		end := int(op.Offset) + bytes
		data := make([]byte, max(end, len(found.data)))
		copy(data, found.data)
		copy(data[op.Offset:], op.Data[:bytes])
		t.replace(found, data)
	case Truncate:
		if found != nil {
			t.replace(found, append(slices.Clone(found.data), make([]byte, op.Offset)...)[:op.Offset])
		}
	case Link:
		t.files[op.To] = found
	case Rename:
		delete(t.files, op.Path)
		t.files[op.To] = found
	case Remove:
		delete(t.files, op.Path)
		delete(t.folders, op.Path)
	}
	return t
}

// replace changes the content of a file under all of its names.
func (t *Tree) replace(old *node, data []byte) {
	changed := &node{data}
	for path, n := range t.files {
		if n == old {
			t.files[path] = changed
		}
	}
}

const (
	// small is the size up to which a write is interrupted at each byte.
	small = 256
	// pageBytes is where the kernel interrupts the larger ones.
	pageBytes = 4096
)

// cuts returns where a write is interrupted: at each byte of a small one; of others at the
// boundaries of pages, at most sixteen of them, and next to the first and the last byte.
func cuts(bytes int) (at []int) {
	if bytes <= small {
		for n := range bytes {
			at = append(at, n)
		}
		return at[min(1, len(at)):]
	}
	at = append(at, 1, bytes/2, bytes-1)
	pages := (bytes - 1) / pageBytes
	for n := 1; n <= pages; n += max(1, pages/16) {
		at = append(at, n*pageBytes)
	}
	slices.Sort(at)
	return slices.Compact(at)
}

// State is what a SIGKILL left.
type State struct {
	Tree *Tree
	// Done is the number of complete operations, and Bytes the number of those of the next one.
	Done, Bytes int
	// Next is the operation that did not end. The zero value: all have ended.
	Next Op
}

func (s State) String() string {
	if s.Bytes > 0 {
		return fmt.Sprintf("%d operations and %d bytes of the %s", s.Done, s.Bytes, s.Next)
	}
	return fmt.Sprintf("%d operations, before the %s", s.Done, s.Next)
}

// States yields every state that operations pass through, from the start to the end.
func States(start *Tree, ops []Op, yield func(State) bool) *Tree {
	for n, op := range ops {
		if !yield(State{Tree: start, Done: n, Next: op}) {
			return start
		}
		if op.Kind == Write {
			for _, bytes := range cuts(len(op.Data)) {
				if !yield(State{Tree: start.after(op, bytes), Done: n, Bytes: bytes, Next: op}) {
					return start
				}
			}
		}
		start = start.after(op, len(op.Data))
	}
	yield(State{Tree: start, Done: len(ops)})
	return start
}
