package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/exit"
)

// plugin is a plugin that a configuration can use. From is builtin, package, or manifest. Problem
// says why it can't be used.
type plugin struct {
	Kind         string            `json:"kind"`
	Name         string            `json:"name"`
	From         string            `json:"from"`
	Version      string            `json:"version"`
	Digest       string            `json:"digest,omitempty"`
	Use          string            `json:"use"`
	Problem      string            `json:"problem,omitempty"`
	Distribution string            `json:"distribution,omitempty"` // of a package
	Packages     map[string]string `json:"packages,omitempty"`     // name -> version, of an environment with its own interpreter
	Python       string            `json:"python,omitempty"`       // that interpreter, if it is in the state folder
}

// pluginPackage is an installed package.
type pluginPackage struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Digest  string `json:"digest"`
}

// report is what the checks of a plugin found.
type report struct {
	Plugin   string    `json:"plugin"`
	Kind     string    `json:"kind"`
	Passed   bool      `json:"passed"`
	Seconds  float64   `json:"seconds"`
	Verdicts []verdict `json:"verdicts"`
}

// verdict is the result of a check: pass, fail, or skip.
type verdict struct {
	Check   string  `json:"check"`
	Verdict string  `json:"verdict"`
	Seconds float64 `json:"seconds"`
	Detail  string  `json:"detail"`
	Fix     string  `json:"fix"`
}

// made is a new plugin.
type made struct {
	Folder   string   `json:"folder"`
	Files    []string `json:"files"`
	Plugin   string   `json:"plugin"`
	Kind     string   `json:"kind"`
	Commands []string `json:"commands"`
	Config   string   `json:"config"`
}

// answer is what the worker prints.
type answer struct {
	made
	Plugins  []plugin          `json:"plugins"`
	Package  *pluginPackage    `json:"package"`
	Report   *report           `json:"report"`
	Python   string            `json:"python"`
	Packages map[string]string `json:"packages"`
	Kind     string            `json:"kind"`  // as a configuration writes it
	Suite    bool              `json:"suite"` // it is a kind of suites, not of environments
	Error    *struct {
		Reason  string `json:"reason"`
		Message string `json:"message"`
		Fix     string `json:"fix"`
		File    string `json:"file"`
		Line    int    `json:"line"`
	} `json:"error"`
}

// ask runs `rollout-worker plugin`. log gets its other output.
func ask(ctx context.Context, log io.Writer, command []string, request map[string]any) (*answer, error) {
	scratch, err := os.MkdirTemp("", "rollout-request-")
	if err != nil {
		return nil, exit.New(exit.CannotMake, "set TMPDIR to a folder with space", "make a temporary folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(scratch) }()
	text, err := json.Marshal(request)
	spec := filepath.Join(scratch, "request.json")
	if err == nil {
		err = os.WriteFile(spec, text, 0o600)
	}
	if err != nil {
		return nil, exit.New(exit.CannotMake, "", "write the worker's request: %w", err)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, command[0], append(command[1:], "plugin", "--spec", spec)...)
	cmd.Stdout, cmd.Stderr = &out, log
	failed := cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var got answer
	switch err := json.Unmarshal(out.Bytes(), &got); {
	case err == nil && got.Error != nil:
		e := got.Error
		if e.File != "" && e.Line != 0 {
			e.Message = fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Message)
		}
		return nil, &exit.Error{Code: codeOf(e.Reason), Reason: e.Reason, Fix: e.Fix, Err: errors.New(e.Message)}
	case failed != nil:
		return nil, exit.New(exit.Unavailable, "see the lines above, or name another command with --worker", "%s: %w", strings.Join(command, " "), failed)
	case err != nil:
		return nil, exit.New(exit.Software, "name another command with --worker", "%s printed no answer: %w", strings.Join(command, " "), err)
	}
	return &got, nil
}

func versions(packages map[string]string) string {
	var texts []string
	for _, name := range slices.Sorted(maps.Keys(packages)) {
		texts = append(texts, name+" "+packages[name])
	}
	return strings.Join(texts, ", ")
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// codeOf returns the exit code of a reason. What the worker refuses is a mistake in the command
// line or in the plugin, except where an index of packages fails.
func codeOf(reason string) int {
	switch reason {
	case "PLUGIN_NEW":
		return exit.Usage
	case "PLUGIN_INSTALL":
		return exit.Unavailable
	}
	return exit.Data
}
