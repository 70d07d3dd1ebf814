// Package program finds the programs that belong to this one.
package program

import (
	"os"
	"os/exec"
	"path/filepath"
)

// Find looks for a program in the folder of this executable, whose symlinks are followed, then on
// PATH.
func Find(name string) (string, error) {
	if self, err := os.Executable(); err == nil {
		if real, err := filepath.EvalSymlinks(self); err == nil {
			self = real
		}
		sibling := filepath.Join(filepath.Dir(self), name)
		if info, err := os.Stat(sibling); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return sibling, nil
		}
	}
	found, err := exec.LookPath(name)
	if err != nil {
		return "", err
	}
	return filepath.Abs(found)
}
