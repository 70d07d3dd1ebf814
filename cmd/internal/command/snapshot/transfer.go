package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/archive"
	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/cmd/internal/tempdir"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/id"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

func exportCommand(env *cli.Env) *cobra.Command {
	var to string
	var withoutInputs bool
	cmd := &cobra.Command{
		Use:   "export SNAPSHOT|RUN",
		Short: "Write a snapshot to one file, for another control plane",
		Long: "Write a snapshot to one file (tar), for another control plane: its training state, the plan of its run, and the files that the plan\n" +
			"reads (model, data, reward). Of a RUN, the newest snapshot is written. `rollout snapshot import` reads the file.\n\n" + cli.FolderHelp,
		Example: "  rollout snapshot export addition-grpo --to addition.tar\n  rollout snapshot export snap-01kapq5q5m --to state.tar --without-inputs",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if to == "" {
				return cli.Usage("name the file to write: --to FILE")
			}
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				snapshot, err := record.SnapshotOf(ctx, r, args[0])
				if err != nil {
					return err
				}
				if snapshot.GetOrigin() == nil {
					status, err := r.Run(ctx, snapshot.GetRunId())
					if err != nil {
						return err
					}
					snapshot.Origin = &snapshotv1.Origin{Plan: status.GetRun().GetPlan(), BaseDir: status.GetRun().GetBaseDir()}
				}
				return export(ctx, env, r, snapshot, to, !withoutInputs)
			})
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "`file` to write; it must not exist")
	cmd.Flags().BoolVar(&withoutInputs, "without-inputs", false, "leave out the files that the plan reads; they must be at the same paths where the snapshot is imported")
	return cmd
}

// export writes the file under another name first, so that it is whole when it has its own.
func export(ctx context.Context, env *cli.Env, r record.Reader, snapshot *snapshotv1.Snapshot, to string, withInputs bool) (err error) {
	if _, err := os.Lstat(to); !errors.Is(err, os.ErrNotExist) {
		return exit.New(exit.CannotMake, "choose a file that does not exist", "%s already exists", to)
	}
	cannot := func(err error) error {
		return exit.New(exit.CannotMake, "choose another file with --to", "cannot write %s: %w", to, err)
	}
	scratch, err := tempdir.Make(filepath.Dir(to), ".export-")
	if err != nil {
		return cannot(err)
	}
	defer func() { err = errors.Join(err, scratch.Remove()) }()
	file, err := os.Create(filepath.Join(scratch.Path, "snapshot.tar"))
	if err != nil {
		return cannot(err)
	}
	written, err := archive.Write(ctx, file, r, snapshot, withInputs)
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	if err := os.Rename(file.Name(), to); err != nil {
		return cannot(err)
	}
	if len(written.Left) > 0 {
		env.Note("not in the file, provide them where the snapshot is restored: %s", strings.Join(written.Left, ", "))
	}
	return env.Message(snapshot, func() string {
		return fmt.Sprintf("%s of step %s, %d files of the state and %d inputs, %s: %s\nnext: rollout snapshot import %s (on the other control plane)\n", snapshot.GetSnapshotId(),
			output.Count(snapshot.GetStep()), written.Artifacts, written.Inputs, output.Bytes(uint64(written.Bytes)), to, filepath.Base(to))
	})
}

func importCommand(env *cli.Env) *cobra.Command {
	var folder string
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Add a snapshot that another control plane exported",
		Long: "Add a snapshot that another control plane exported, and write the files that its plan reads into a folder, where restored runs read\n" +
			"them. Every byte is verified. A second import of the same snapshot changes nothing in the control plane.",
		Example: "  rollout snapshot import addition.tar\n  rollout snapshot import addition.tar --inputs /data/addition",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if folder == "" {
				folder = strings.TrimSuffix(filepath.Base(args[0]), ".tar") + "-inputs"
				if at, err := filepath.Abs(folder); err == nil {
					env.Note("the inputs of the run are written to %s; choose another folder with --inputs", at)
				}
			}
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				snapshot, err := load(ctx, c, args[0], folder)
				if err != nil {
					return err
				}
				if base := snapshot.GetOrigin().GetBaseDir(); base != "" {
					if _, err := os.Stat(base); err != nil {
						env.Note("the snapshot was imported before, and restored runs read its inputs in %s, which does not exist: move the folder %s there", base, folder)
					}
				}
				if missing := archive.Missing(snapshot.GetOrigin().GetPlan()); len(missing) > 0 {
					env.Note("restored runs read files that are not in %s and not on this host: copy them to %s", args[0], strings.Join(missing, ", "))
				}
				return env.Message(snapshot, func() string {
					return fmt.Sprintf("%s of step %s of %s; its inputs are in %s\nnext: rollout snapshot restore %s\n", snapshot.GetSnapshotId(),
						output.Count(snapshot.GetStep()), snapshot.GetRunId(), snapshot.GetOrigin().GetBaseDir(), snapshot.GetSnapshotId())
				})
			})
		},
	}
	cmd.Flags().StringVar(&folder, "inputs", "", "`folder` for the inputs; it must not exist (default: FILE without .tar, with -inputs, in the current folder)")
	return cmd
}

// load reads an archive. Its inputs are in a temporary folder until everything has been read.
func load(ctx context.Context, c *client.Client, path, folder string) (_ *snapshotv1.Snapshot, err error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, exit.New(exit.NoInput, "name a file that `rollout snapshot export` wrote", "%w", err)
	}
	defer func() { _ = file.Close() }()
	if folder, err = filepath.Abs(folder); err != nil {
		return nil, err
	}
	if _, err := os.Lstat(folder); !errors.Is(err, os.ErrNotExist) {
		return nil, exit.New(exit.CannotMake, "name a folder that does not exist with --inputs", "%s already exists", folder)
	}
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		return nil, exit.New(exit.CannotMake, "name another folder with --inputs", "cannot write %s: %w", folder, err)
	}
	scratch, err := tempdir.Make(filepath.Dir(folder), ".import-")
	if err != nil {
		return nil, exit.New(exit.CannotMake, "name another folder with --inputs", "cannot write %s: %w", folder, err)
	}
	defer func() { err = errors.Join(err, scratch.Remove()) }()
	staged := filepath.Join(scratch.Path, "inputs")
	snapshot, err := archive.Read(ctx, path, file, artifacts{c.Artifacts}, staged)
	if err != nil {
		return nil, err
	}
	if origin := snapshot.GetOrigin(); strings.HasPrefix(origin.GetBaseDir(), staged) {
		origin.BaseDir = folder + strings.TrimPrefix(origin.GetBaseDir(), staged)
		if err := os.MkdirAll(filepath.Join(staged, strings.TrimPrefix(origin.GetBaseDir(), folder)), 0o755); err != nil {
			return nil, err
		}
		if err := os.Rename(staged, folder); err != nil {
			return nil, exit.New(exit.CannotMake, "name another folder with --inputs", "cannot write %s: %w", folder, err)
		}
	}
	snapshot.SnapshotId, snapshot.CreateTime, snapshot.Bytes = "", nil, 0
	made, err := c.Snapshot.CreateSnapshot(ctx, &snapshotv1.CreateSnapshotRequest{Snapshot: snapshot, Directory: filepath.Join(scratch.Path, "artifacts")})
	return made.GetSnapshot(), err
}

// artifacts stores artifacts in the storage service.
type artifacts struct {
	client storagev1.ArtifactServiceClient
}

// Put implements archive.Target.
func (a artifacts) Put(ctx context.Context, content string, r io.Reader) (string, error) {
	known, err := a.client.StatArtifacts(ctx, &storagev1.StatArtifactsRequest{ContentIds: []string{content}})
	if err != nil {
		return "", err
	}
	if found := known.GetArtifacts(); len(found) == 1 && found[0].GetExists() {
		return content, nil
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop() // ends the call if the archive cannot be read
	stream, err := a.client.PutArtifact(ctx)
	if err != nil {
		return "", err
	}
	hash := id.NewHasher()
	// the wrapper hides WriteTo of the reader, whose writes could be larger than a message
	if _, err := io.CopyBuffer(io.MultiWriter(hash, chunks{stream}), struct{ io.Reader }{r}, make([]byte, 1<<20)); err != nil {
		return "", err
	}
	if found := hash.ID(); found != content {
		return found, nil // nothing is stored
	}
	stored, err := stream.CloseAndRecv()
	return stored.GetContentId(), err
}

// chunks sends what is written, at most 1 MiB at a time.
type chunks struct {
	stream storagev1.ArtifactService_PutArtifactClient
}

func (c chunks) Write(p []byte) (int, error) {
	err := c.stream.Send(&storagev1.PutArtifactRequest{Chunk: p})
	if errors.Is(err, io.EOF) { // the call has ended; its error follows
		if _, ended := c.stream.CloseAndRecv(); ended != nil {
			err = ended
		}
	}
	return len(p), err
}
