package plan

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// hubName is the form of a name on the Hugging Face Hub, with an optional revision.
var hubName = regexp.MustCompile(`^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?$`)

// files are the endings of paths that are never names on the hub.
var files = []string{".jsonl", ".ndjson", ".json", ".txt", ".parquet", ".csv", ".tsv", ".arrow", ".feather", ".gz"}

// OnHub reports whether a path is a name on the hub: it has that form, does not exist, and is not a
// path into an existing folder or to a data file.
func OnHub(baseDir, path string) bool {
	repository, _, _ := strings.Cut(path, "@")
	if !hubName.MatchString(path) || slices.Contains(files, filepath.Ext(repository)) {
		return false
	}
	owner, _, _ := strings.Cut(path, "/")
	_, err := os.Stat(filepath.Join(baseDir, owner))
	return errors.Is(err, fs.ErrNotExist)
}
