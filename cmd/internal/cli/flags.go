package cli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/program"
	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Sentences of help texts.
const (
	FolderHelp = "If a control plane runs, the command asks it. If not, the command reads the state folder and starts nothing."
	RunHelp    = "RUN is the id of a run, a unique prefix of the id, or a name, which stands for the newest run of that name."
)

// ConfigFlags are the flags of commands that read a run configuration.
type ConfigFlags struct {
	File string
	Set  []string
}

// AddTo adds the flags to cmd.
func (f *ConfigFlags) AddTo(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.File, "config", "c", "", "configuration `file` (TOML)")
	cmd.Flags().StringArrayVar(&f.Set, "set", nil, "override a field, `table.key=value`; can be repeated")
	_ = cmd.MarkFlagFilename("config", "toml")
}

// Source reads the configuration file.
func (f *ConfigFlags) Source() (*planv1.ConfigSource, error) {
	text, err := ReadFile(f.File, "configuration")
	if err != nil {
		return nil, err
	}
	folder, err := filepath.Abs(filepath.Dir(f.File))
	if err != nil {
		return nil, err
	}
	return &planv1.ConfigSource{Toml: text, File: f.File, BaseDir: folder, Set: f.Set}, nil
}

// ReadFile reads a file that the user named; what says what it is.
func ReadFile(name, what string) ([]byte, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, exit.New(exit.NoInput, "correct the path", "cannot read the %s %s: %w", what, name, PathCause(err))
	}
	return data, nil
}

// PathCause returns the cause of an os.PathError, so that a message does not name the path twice.
func PathCause(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

// WorkerFlag is --worker of commands that start a worker process.
type WorkerFlag struct{ command string }

// AddTo adds the flag to cmd.
func (f *WorkerFlag) AddTo(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.command, "worker", "", "`command` that starts a worker (default: rollout-worker in the folder of rollout, or on PATH)")
}

// For returns the words of the command for a worker with an engine: by default those of the
// interpreter that a configuration in the folder base names.
func (f *WorkerFlag) For(engine *configv1.EngineConfig, base string) []string {
	python := engine.GetPython()
	if python == "" || f.command != "" {
		return f.Command()
	}
	if !filepath.IsAbs(python) {
		python = filepath.Join(base, python)
	}
	return []string{python, "-P", "-m", "rollout_workers"}
}

// Command returns the words of the command. Where rollout-worker is not found, starting it fails.
func (f *WorkerFlag) Command() []string {
	if command := strings.Fields(f.command); len(command) > 0 {
		return command
	}
	const name = "rollout-worker"
	if found, err := program.Find(name); err == nil {
		return []string{found}
	}
	return []string{name}
}
