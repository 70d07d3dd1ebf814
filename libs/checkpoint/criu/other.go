//go:build !linux

package criu

import (
	"context"
	"runtime"

	"github.com/rollout-rl/rollout/libs/checkpoint"
)

func unsupported() *checkpoint.Error {
	return checkpoint.Fail(checkpoint.ReasonUnavailable, "use Linux", "CRIU saves processes of Linux; this is %s", runtime.GOOS)
}

// Checkpointer refuses every call: this system has no CRIU.
type Checkpointer struct{}

// New returns a Checkpointer that refuses every call.
func New(string, ...string) *Checkpointer { return &Checkpointer{} }

// Probe implements checkpoint.Checkpointer.
func (*Checkpointer) Probe(context.Context) checkpoint.Report {
	return checkpoint.Report{Error: unsupported()}
}

// Dump implements checkpoint.Checkpointer.
func (*Checkpointer) Dump(context.Context, int, string, bool) (checkpoint.Image, error) {
	return checkpoint.Image{}, unsupported()
}

// Restore implements checkpoint.Checkpointer.
func (*Checkpointer) Restore(context.Context, string, checkpoint.Restore) (checkpoint.Process, error) {
	return nil, unsupported()
}

// Init refuses.
func Init() int { return 69 }
