// Package merge merges the adapters of a training state into their base model.
//
// It starts no service. A worker process (`rollout-worker merge`) reads a file that names the
// folders, and merges with the code of the learner.
package merge

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Job describes the work. Folders are absolute.
type Job struct {
	Config  *configv1.RunConfig // of the run that trained the adapters
	Base    string              // folder of the run's model
	Adapter string              // folder of the adapters
	To      string              // folder to write, which must not exist
	Step    uint64              // version of the weights
	Worker  []string            // command that starts a worker; "merge" is appended
	Scratch string              // an existing folder
}

// maxTail is how much of the worker's log an error has, in bytes.
const maxTail = 2000

// Run writes the merged weights and returns their digest. On another kind of processor it can
// differ in rounding from the digest that the run recorded. Errors have an exit code (exit.Error).
func (j *Job) Run(ctx context.Context) (digest string, err error) {
	config, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(j.Config)
	if err != nil {
		return "", fmt.Errorf("write the worker's spec: %w", err)
	}
	text, err := json.Marshal(map[string]any{
		"config": json.RawMessage(config), "base": j.Base, "adapter": j.Adapter, "to": j.To, "step": j.Step,
	})
	if err != nil {
		return "", fmt.Errorf("write the worker's spec: %w", err)
	}
	spec := filepath.Join(j.Scratch, "merge.json")
	if err := os.WriteFile(spec, text, 0o600); err != nil {
		return "", exit.New(exit.CannotMake, "", "write the worker's spec: %w", err)
	}
	args := append(slices.Clone(j.Worker), "merge", "--spec", spec)
	var out, log bytes.Buffer
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Start(); err != nil {
		return "", exit.New(exit.NoInput, "build it (`make build`), or name the command with --worker", "start the worker: %w", err)
	}
	failed := cmd.Wait()
	var answer struct{ Digest, Reason, Message, Fix string }
	for line := range bytes.Lines(out.Bytes()) {
		_ = json.Unmarshal(line, &answer) // other lines are output of libraries
	}
	switch {
	case ctx.Err() != nil:
		return "", exit.New(exit.Interrupted, "", "interrupted")
	case answer.Reason != "":
		return "", &exit.Error{Code: exit.Data, Reason: answer.Reason, Fix: answer.Fix, Err: errors.New("merge the adapters: " + answer.Message)}
	case failed != nil || answer.Digest == "":
		tail := bytes.TrimSpace(log.Bytes())
		return "", exit.New(exit.Software, "see the worker's log", "the worker could not merge the adapters: %w\n%s", failed, tail[max(0, len(tail)-maxTail):])
	}
	return answer.Digest, nil
}
