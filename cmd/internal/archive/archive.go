// Package archive writes a snapshot with the plan and the inputs of its run into one tar file, and
// reads such files.
//
// The entries are, in this order: `snapshot.json`, the manifest; `artifacts/<content id>`, each
// file of the snapshot once; and `inputs/<path>`, the files that the plan names. In the manifest,
// `origin.base_dir` is relative to `inputs`.
package archive

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/id"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

const (
	manifest  = "snapshot.json"
	artifacts = "artifacts/"
	inputs    = "inputs/"
)

// file is a file of a plan.
type file struct {
	path   string // as in the plan
	digest string
	bytes  uint64
}

// files returns the files that a plan reads from its folder, and the names of inputs that an
// archive cannot carry: absolute paths and files of a hub.
func files(plan *planv1.Plan) (carried []file, left []string) {
	add := func(path, digest string, bytes uint64, local bool) {
		if local && !filepath.IsAbs(filepath.FromSlash(path)) {
			carried = append(carried, file{path, digest, bytes})
			return
		}
		left = append(left, path)
	}
	for _, in := range plan.GetInputs() {
		if len(in.GetSources()) == 0 {
			add(in.GetPath(), in.GetDigest(), in.GetBytes(), in.GetRevision() == "")
		}
		for _, source := range in.GetSources() {
			if len(source.GetFiles()) == 0 {
				left = append(left, source.GetPath())
			}
			for _, f := range source.GetFiles() {
				add(f.GetPath(), f.GetDigest(), f.GetBytes(), source.GetRevision() == "")
			}
		}
	}
	return carried, left
}

// Missing returns the files of a plan that an archive does not carry and that this host does not
// have, as in the plan. Those of a hub are not among them.
func Missing(plan *planv1.Plan) []string {
	var missing []string
	_, left := files(plan)
	for _, path := range left {
		if !filepath.IsAbs(filepath.FromSlash(path)) {
			continue
		}
		if _, err := os.Stat(filepath.FromSlash(path)); errors.Is(err, os.ErrNotExist) {
			missing = append(missing, path)
		}
	}
	return missing
}

// place says where the files of a plan are inside of an archive.
type place struct {
	root string // absolute folder that becomes `inputs`
	base string // folder of the plan, relative to root, with slashes
}

// placed returns the place of files that are relative to an absolute folder: the deepest one that
// contains them all.
func placed(base string, files []file) place {
	root := filepath.Clean(base)
	for _, f := range files {
		for !within(root, filepath.Join(base, filepath.FromSlash(f.path))) {
			root = filepath.Dir(root)
		}
	}
	rel, err := filepath.Rel(root, base)
	if err != nil {
		rel = "." // both are absolute and root contains base
	}
	return place{root: root, base: filepath.ToSlash(rel)}
}

func within(folder, path string) bool {
	rel, err := filepath.Rel(folder, path)
	return err == nil && filepath.IsLocal(rel)
}

// name returns the name of a file in the archive.
func (p place) name(f file) string {
	return inputs + filepath.ToSlash(filepath.Join(filepath.FromSlash(p.base), filepath.FromSlash(f.path)))
}

// distinct returns the files of a snapshot by content id, each once, in order.
func distinct(s *snapshotv1.Snapshot) []*snapshotv1.SnapshotFile {
	var out []*snapshotv1.SnapshotFile
	seen := map[string]bool{}
	for _, f := range s.GetFiles() {
		if !seen[f.GetDigest()] {
			seen[f.GetDigest()] = true
			out = append(out, f)
		}
	}
	return out
}

// copied copies exactly size bytes with a content id.
func copied(w io.Writer, r io.Reader, name, content string, size uint64) error {
	hash := id.NewHasher()
	n, err := io.Copy(io.MultiWriter(w, hash), r)
	if err != nil {
		return err
	}
	if uint64(n) != size || hash.ID() != content {
		return &changed{name: name}
	}
	return nil
}

// changed is the error of a file with other content than its manifest says.
type changed struct{ name string }

func (c *changed) Error() string { return c.name + " does not have the content of its manifest" }

// counting counts the bytes that were read.
type counting struct {
	io.Reader
	bytes int64
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.bytes += int64(n)
	return n, err
}

// damaged is the error of an archive that cannot be read further.
func damaged(path string, at int64, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = errors.New("the file ends here")
	}
	return exit.New(exit.Data, "copy the file again, or export the snapshot again", "%s is damaged at byte %d: %w", path, at, err)
}

// local returns the path below a folder that an entry names, or an error if it is outside.
func local(folder, entry string) (string, error) {
	path := filepath.FromSlash(strings.TrimPrefix(entry, inputs))
	if !filepath.IsLocal(path) {
		return "", fmt.Errorf("the entry %q is outside of the folder", entry)
	}
	return filepath.Join(folder, path), nil
}
