package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/rollout-rl/rollout/libs/id"
)

// manifestFile is the manifest of a published version, in its folder.
const manifestFile = "rollout_weights.json"

// PublishedFile is a file of published weights. Its manifest has the size and the digest.
type PublishedFile struct {
	Version uint64
	Path    string // from the run's folder, with slashes
	Flaw    string // what is wrong; "" if nothing is
	Missing bool
	Bytes   uint64 // read
}

// CheckWeights compares the files of the versions in the run's folder with their manifests. It does
// nothing if the folder is not on this host. With readFiles it reads the files, else it only checks
// that they exist. A learner removes versions at any time: one that is gone afterwards is not
// reported.
func (e *Evidence) CheckWeights(directory string, readFiles bool) error {
	folders, err := filepath.Glob(filepath.Join(directory, "weights", "v[0-9]*"))
	if err != nil {
		return fmt.Errorf("list the weights in %s: %w", directory, err)
	}
	for _, folder := range folders {
		version, err := strconv.ParseUint(strings.TrimPrefix(filepath.Base(folder), "v"), 10, 64)
		if err != nil {
			continue
		}
		found := checkVersion(folder, readFiles)
		if _, err := os.Lstat(folder); err != nil {
			continue
		}
		for _, f := range found {
			f.Version, f.Path = version, "weights/"+filepath.Base(folder)+"/"+f.Path
			e.Published = append(e.Published, f)
		}
	}
	return nil
}

// checkVersion checks the files of one version that have a digest in its manifest. The tensors of a
// version that does not outlive the learner have none.
func checkVersion(folder string, readFiles bool) []PublishedFile {
	text, err := os.ReadFile(filepath.Join(folder, manifestFile))
	if err != nil {
		return nil // of a dead learner, in memory
	}
	var manifest struct {
		Files []struct {
			Path, Digest string
			Bytes        int64
		}
	}
	if err := json.Unmarshal(text, &manifest); err != nil {
		return []PublishedFile{{Path: manifestFile, Flaw: "it is not JSON: " + err.Error()}}
	}
	var out []PublishedFile
	for _, f := range manifest.Files {
		if f.Digest == "" || !filepath.IsLocal(f.Path) {
			continue
		}
		checked := PublishedFile{Path: f.Path}
		info, err := os.Stat(filepath.Join(folder, f.Path))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			checked.Missing, checked.Flaw = true, "it does not exist"
		case err != nil:
			checked.Flaw = err.Error()
		case info.Size() != f.Bytes:
			checked.Flaw = fmt.Sprintf("it has %d bytes; %d were published", info.Size(), f.Bytes)
		case readFiles:
			checked.Bytes, checked.Flaw = readPublished(filepath.Join(folder, f.Path), f.Digest)
		}
		out = append(out, checked)
	}
	return out
}

// readPublished returns the size of a file, and how its content differs from a digest.
func readPublished(path, digest string) (read uint64, flaw string) {
	file, err := os.Open(path)
	if err != nil {
		return 0, err.Error()
	}
	defer file.Close()
	content, size, err := id.ContentOf(file)
	switch {
	case err != nil:
		return 0, err.Error()
	case content != digest:
		return 0, fmt.Sprintf("its content is %s; %s was published", content, digest)
	}
	return uint64(size), ""
}

// weightsCheck checks the files of published weights.
type weightsCheck struct {
	*index
	*findings
}

func (c weightsCheck) files() {
	for _, f := range c.Published {
		at := Break{Step: f.Version}
		switch {
		case f.Missing:
			c.add(at, "WEIGHTS_FILE_MISSING", "%s of the run's folder does not exist; its manifest lists it", f.Path)
		case f.Flaw != "":
			c.add(at, "WEIGHTS_FILE_CHANGED", "%s of the run's folder was changed: %s", f.Path, f.Flaw)
		case f.Bytes > 0:
			c.report.Published.Whole, c.report.Published.Bytes = c.report.Published.Whole+1, c.report.Published.Bytes+f.Bytes
		}
	}
}
