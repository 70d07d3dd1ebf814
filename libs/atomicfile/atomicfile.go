// Package atomicfile writes files whole or not at all.
package atomicfile

import (
	"errors"
	"os"
	"path/filepath"
)

// Write writes data to a temporary file in the folder of path, fsyncs it, and renames it to path,
// so that a reader finds the previous content or all of data. The file gets mode independent of the
// umask. The folder must exist. After an error the temporary file is removed.
func Write(path string, data []byte, mode os.FileMode) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*") // 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(data)
	if err = errors.Join(err, tmp.Chmod(mode), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}
