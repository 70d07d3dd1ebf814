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
		return exit.New(exit.CannotMake, "name another folder with --out", "can't write the report: %w", err)
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
		var b bytes.Buffer
		if err := draw(&b); err != nil {
			return live.Paths{}, err
		}
		if err := os.WriteFile(path+".tmp", b.Bytes(), 0o644); err != nil {
			return live.Paths{}, fail(err)
		}
		if err := os.Rename(path+".tmp", path); err != nil {
			return live.Paths{}, fail(err)
		}
	}
	return paths, nil
}
