package report

import (
	"bytes"
	"io"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/libs/exit"
)

// Write makes the folder and writes `reward.png` and `index.html` into it.
func (d *Data) Write(folder string) (live.Paths, error) {
	fail := func(err error) error {
		return exit.New(exit.CannotMake, "name another folder with --out", "cannot write the report: %w", err)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return live.Paths{}, fail(err)
	}
	folder, err := filepath.Abs(folder)
	if err != nil {
		return live.Paths{}, fail(err)
	}
	paths := live.Paths{PNG: filepath.Join(folder, "reward.png"), HTML: filepath.Join(folder, "index.html")}
	for path, draw := range map[string]func(io.Writer) error{paths.PNG: d.PNG, paths.HTML: d.HTML} {
		if err := WriteFile(path, draw); err != nil {
			return live.Paths{}, err
		}
	}
	return paths, nil
}

// WriteFile writes what draw draws to a file, atomically.
func WriteFile(path string, draw func(io.Writer) error) error {
	var b bytes.Buffer
	if err := draw(&b); err != nil {
		return err
	}
	err := os.WriteFile(path+".tmp", b.Bytes(), 0o644)
	if err == nil {
		err = os.Rename(path+".tmp", path)
	}
	if err != nil {
		return exit.New(exit.CannotMake, "name another place", "cannot write %s: %w", path, err)
	}
	return nil
}
