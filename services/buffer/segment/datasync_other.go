//go:build !linux

package segment

import "os"

// datasync makes a file durable.
func datasync(f *os.File) error { return f.Sync() }
