package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/tempdir"
	"github.com/rollout-rl/rollout/libs/checkpoint"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/trainstate"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// extracted is what the command reports.
type extracted struct {
	Snapshot string   `json:"snapshot"`
	Folder   string   `json:"folder"`
	Files    int      `json:"files"`
	Bytes    uint64   `json:"bytes"`
	Images   []string `json:"images,omitempty"` // folders with an image of a process
}

func extractCommand(env *cli.Env) *cobra.Command {
	var to string
	var parts []string
	cmd := &cobra.Command{
		Use:   "extract SNAPSHOT|RUN",
		Short: "Write the files of a snapshot to a folder",
		Long: "Write the files of a snapshot to a folder, and verify them. Of a RUN, the newest training state is written.\n\n" +
			"A snapshot of kind process has an image in processes/ID, which `rollout process restore` continues. It contains the memory of the\n" +
			"process, secrets included: only you can read what is written. `rollout doctor` shows whether this host can restore processes.\n\n" + cli.FolderHelp,
		Example: "  rollout snapshot extract snap-01kapq5q5m --to files\n  rollout snapshot extract snap-01kapq5q5m --to images --path processes",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to == "" {
				return cli.Usage("name the new folder with --to")
			}
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				snap, err := record.SnapshotOf(ctx, r, args[0])
				if err != nil {
					return err
				}
				if len(parts) > 0 {
					all := snap
					if snap = trainstate.Only(all, parts...); len(snap.GetFiles()) == 0 {
						return exit.New(exit.Usage, "`rollout snapshot show "+all.GetSnapshotId()+"` shows its files", "snapshot %s has no file in %s", all.GetSnapshotId(), strings.Join(parts, ", "))
					}
				}
				if err := extract(ctx, r, snap, to); err != nil {
					return err
				}
				done := extracted{Snapshot: snap.GetSnapshotId(), Folder: to, Files: len(snap.GetFiles()), Images: images(snap, to)}
				for _, f := range snap.GetFiles() {
					done.Bytes += f.GetBytes()
				}
				if env.JSON() {
					return output.Value(env.Stdout, done)
				}
				fmt.Fprintf(env.Stdout, "%s: %d files, %s, in %s\n", done.Snapshot, done.Files, output.Bytes(done.Bytes), to)
				for _, image := range done.Images {
					fmt.Fprintf(env.Stdout, "next: rollout process restore %s\n", image)
				}
				return nil
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "the new `folder`")
	cmd.Flags().StringSliceVar(&parts, "path", nil, "write only these `files` or folders of the snapshot, separated by commas")
	return cmd
}

// images returns the folders of the images of processes.
func images(s *snapshotv1.Snapshot, folder string) (found []string) {
	for _, f := range s.GetFiles() {
		if trainstate.In(f, trainstate.Processes) && path.Base(f.GetPath()) == checkpoint.Manifest {
			found = append(found, filepath.Join(folder, filepath.FromSlash(path.Dir(f.GetPath()))))
		}
	}
	slices.Sort(found)
	return found
}

// extract writes files to another folder first, so that the folder is whole when it has its name.
func extract(ctx context.Context, r record.Reader, s *snapshotv1.Snapshot, to string) (err error) {
	if _, err := os.Lstat(to); !errors.Is(err, os.ErrNotExist) {
		return exit.New(exit.CannotMake, "choose a folder that does not exist", "%s already exists", to)
	}
	cannot := func(err error) error {
		return exit.New(exit.CannotMake, "choose another folder with --to", "cannot write %s: %w", to, err)
	}
	scratch, err := tempdir.Make(filepath.Dir(filepath.Clean(to)), ".extract-")
	if err != nil {
		return cannot(err)
	}
	defer func() { err = errors.Join(err, scratch.Remove()) }()
	staged := filepath.Join(scratch.Path, "files")
	if err := os.Mkdir(staged, 0o700); err != nil {
		return cannot(err)
	}
	for _, f := range s.GetFiles() {
		if !filepath.IsLocal(filepath.FromSlash(f.GetPath())) {
			return exit.New(exit.Data, "take the snapshot from its source again", "the file %q of snapshot %s is outside of the folder", f.GetPath(), s.GetSnapshotId())
		}
		if err := write(ctx, r, s, f, filepath.Join(staged, filepath.FromSlash(f.GetPath()))); err != nil {
			return err
		}
	}
	if err := os.Rename(staged, to); err != nil {
		return cannot(err)
	}
	return nil
}

// write writes a file of a snapshot and compares its digest.
func write(ctx context.Context, r record.Reader, s *snapshotv1.Snapshot, f *snapshotv1.SnapshotFile, name string) (err error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	hash := id.NewHasher()
	if err := r.Artifact(ctx, f.GetDigest(), io.MultiWriter(file, hash)); err != nil {
		return fmt.Errorf("read %s of %s: %w", f.GetPath(), s.GetSnapshotId(), err)
	}
	if hash.ID() != f.GetDigest() {
		return exit.New(exit.Data, "`rollout snapshot verify "+s.GetSnapshotId()+"` shows what is damaged", "%s of %s does not have the content of its manifest", f.GetPath(), s.GetSnapshotId())
	}
	return file.Sync()
}
