//go:build !linux

package process

// Listener finds the process that listens at an address of this host.
func Listener(string) (Process, bool) { return Process{}, false }

// Holder is a process that has a file open.
type Holder struct {
	Process
	Path string
}

// Locking finds another process that has a lock for writing on a file.
func Locking(string) (Process, bool) { return Process{}, false }

// Holding lists the processes of a name that have a file of this name open.
func Holding(_, _ string) []Holder { return nil }
