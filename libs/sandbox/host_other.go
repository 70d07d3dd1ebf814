//go:build !linux

package sandbox

import (
	"context"
	"io"
	"runtime"
)

func unsupported() *Error {
	return fail(ReasonSystem, "run it on Linux, or in a Linux container", "sandboxes need Linux namespaces, which %s does not have", runtime.GOOS)
}

// Host refuses every box: this system has no namespaces.
type Host struct{}

// NewHost returns a host that refuses every box.
func NewHost(string) *Host { return &Host{} }

// Probe reports that nothing is enforced.
func (h *Host) Probe() Report { return Report{Kernel: runtime.GOOS, Error: unsupported()} }

// Run refuses.
func (h *Host) Run(context.Context, Spec, Command) (Result, error) { return Result{}, unsupported() }

// KeepFiles does nothing.
func KeepFiles() error { return nil }

// Init refuses.
func Init() int { return 69 }

// Stage refuses.
func Stage() int { return 69 }

// Serve refuses.
func Serve(context.Context, *Host, io.Reader, io.Writer) error { return unsupported() }
