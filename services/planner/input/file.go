// Package input reads the inputs of a run: datasets, model folders, and files of rewards. It checks
// them without running code, and computes the digest and size of each file.
package input

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/rollout-rl/rollout/libs/id"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// Resolve is the file of a path in the configuration.
func Resolve(baseDir, name string) string {
	if filepath.IsAbs(name) {
		return filepath.Clean(name)
	}
	return filepath.Join(baseDir, filepath.FromSlash(name))
}

// Relative is the path of a file in a plan: relative to the folder of the configuration, with
// slashes; absolute if `like`, the path in the configuration, is absolute.
func Relative(baseDir, file, like string) string {
	if filepath.IsAbs(like) {
		return filepath.ToSlash(file)
	}
	rel, err := filepath.Rel(baseDir, file)
	if err != nil {
		return filepath.ToSlash(file)
	}
	return path.Clean(filepath.ToSlash(rel))
}

// Digest fills in digest and size of every input, concurrently. It fails with the first file that
// can't be read.
func Digest(ctx context.Context, locate func(*planv1.Input) string, inputs []*planv1.Input) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for _, input := range inputs {
		if input.GetDigest() != "" {
			continue
		}
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			digest, size, err := DigestFile(locate(input))
			input.Digest, input.Bytes = digest, uint64(size)
			return err
		})
	}
	return group.Wait()
}

// DigestFile is the content id and size of one file.
func DigestFile(name string) (string, int64, error) {
	info, err := os.Stat(name)
	if err != nil {
		return "", 0, err
	}
	if !info.Mode().IsRegular() { // reading a pipe or a device may not end
		return "", 0, fmt.Errorf("read %s: not a regular file", name)
	}
	f, err := os.Open(name)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	digest, size, err := id.ContentOf(f)
	if err != nil {
		return "", 0, fmt.Errorf("read %s: %w", name, err)
	}
	return digest, size, nil
}

// Similar is the existing path with the name most similar to a missing path, in the folder of that
// path or in the nearest folder that exists; "" without one. It is relative or absolute as the
// missing path is.
func Similar(baseDir, name string, near func(name string, candidates []string) string) string {
	folder, missing := filepath.Split(filepath.Clean(Resolve(baseDir, name)))
	rest := ""
	for {
		entries, err := os.ReadDir(folder)
		if err == nil {
			sibling := filepath.Join(folder, filepath.Base(name))
			if _, err := os.Stat(sibling); err == nil && rest != "" {
				return Relative(baseDir, sibling, name) // the same name in a parent folder
			}
			var names []string
			for _, e := range entries {
				names = append(names, e.Name())
			}
			found := near(missing, names)
			if found == "" {
				return ""
			}
			full := filepath.Join(folder, found, rest)
			if _, err := os.Stat(full); err != nil {
				full = filepath.Join(folder, found)
			}
			return Relative(baseDir, full, name)
		}
		parent := filepath.Clean(folder)
		rest = filepath.Join(missing, rest)
		folder, missing = filepath.Split(parent)
		if folder == parent || strings.TrimRight(folder, "/") == "" {
			return ""
		}
	}
}
