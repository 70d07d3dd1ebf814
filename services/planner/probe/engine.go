package probe

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/rollout-rl/rollout/libs/engine"
)

// Engine describes an engine in the environment of an interpreter.
type Engine struct {
	Capabilities engine.Capabilities `json:"capabilities"`
	Missing      string              `json:"missing"` // package that the environment lacks; empty: none
}

// engineTime is the time limit of Engine. Nothing large is imported.
const engineTime = time.Minute

// Engine asks an interpreter for the engine `kind`. python: empty for the Prober's own.
func (p *Prober) Engine(ctx context.Context, python, kind string) (*Engine, error) {
	ctx, cancel := context.WithTimeout(ctx, engineTime)
	defer cancel()
	var stdout bytes.Buffer
	var stderr tail
	cmd := exec.CommandContext(ctx, cmp.Or(python, p.Python), "-P", "-m", "rollout_workers.engines.registry", kind)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Dir = os.TempDir()
	cmd.Env = append(append([]string(nil), p.Env...), "PYTHONDONTWRITEBYTECODE=1")
	if p.PythonPath != "" {
		cmd.Env = append(cmd.Env, "PYTHONPATH="+p.PythonPath)
	}
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("it did not answer within %v", engineTime)
	}
	if text := stderr.lastLine(); err != nil && text != "" {
		return nil, errors.New(text)
	}
	if err != nil {
		return nil, err
	}
	var answer Engine
	if err := json.Unmarshal(stdout.Bytes(), &answer); err != nil {
		return nil, fmt.Errorf("it printed no answer: %w", err)
	}
	return &answer, nil
}
