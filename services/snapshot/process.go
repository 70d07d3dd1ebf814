package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/checkpoint"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/trainstate"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// ErrNoProcess reports that there is nothing to save.
var ErrNoProcess = rpcerr.New(codes.FailedPrecondition, "PROCESS_NONE", "the run has no process of an environment on the host of the snapshot service").
	Fix("take it on the host of the workers, while a run with `[environment] kind = \"python\"` samples")

// processKind handles the processes of the environments of a run, each an image in a folder with
// the id of the process. They continue after they were saved. A run that is restored begins their
// episodes again; an image continues with `rollout process restore`.
type processKind struct {
	trainState
	processes Processes
}

// Capture implements Handler.
func (p processKind) Capture(ctx context.Context, s *Snapshot, to Folder) error {
	pids, err := p.processes.Of(s.GetRunId())
	if err != nil {
		return err
	}
	if len(pids) == 0 {
		return ErrNoProcess.With("run", s.GetRunId())
	}
	for _, pid := range pids {
		name := path.Join(trainstate.Processes, strconv.Itoa(pid))
		dir := filepath.Join(to.Dir, filepath.FromSlash(name))
		if err := os.RemoveAll(dir); err != nil { // of an earlier attempt
			return err
		}
		image, err := p.processes.Dump(ctx, pid, dir, true)
		if err != nil {
			return processError(err)
		}
		for _, f := range image.Files {
			s.Files = append(s.Files, &snapshotv1.SnapshotFile{Path: path.Join(name, f.Name), Digest: f.Digest})
		}
		raw, err := os.Open(filepath.Join(dir, checkpoint.Manifest))
		if err != nil {
			return err
		}
		file, err := to.Write(path.Join(name, checkpoint.Manifest), func(w io.Writer) error {
			_, err := io.Copy(w, raw)
			return err
		})
		if err = errors.Join(err, raw.Close()); err != nil {
			return err
		}
		s.Files = append(s.Files, file)
	}
	return nil
}

// processError gives an error of a checkpoint its code.
func processError(err error) error {
	var e *checkpoint.Error
	if !errors.As(err, &e) {
		return err
	}
	return rpcerr.New(codes.FailedPrecondition, e.Reason, "%s", e.Message).Fix(e.Fix)
}

// images returns the paths of the manifests of a snapshot's images.
func images(s *Snapshot) (found []string) {
	for _, f := range s.GetFiles() {
		if trainstate.In(f, trainstate.Processes) && path.Base(f.GetPath()) == checkpoint.Manifest {
			found = append(found, f.GetPath())
		}
	}
	return found
}

// Check implements Handler.
func (p processKind) Check(s *Snapshot, bad *rpcerr.Error) *rpcerr.Error {
	if len(images(s)) == 0 {
		bad = bad.Field("snapshot.files", "must have an image of a process, processes/ID/"+checkpoint.Manifest)
	}
	return p.trainState.Check(trainstate.State(s), bad)
}

// Verify implements Handler: each image has the files of its manifest.
func (p processKind) Verify(ctx context.Context, s *Snapshot, from Files) (flaws []*Flaw, err error) {
	digests := map[string]string{}
	for _, f := range s.GetFiles() {
		digests[f.GetPath()] = f.GetDigest()
	}
	for _, at := range images(s) {
		file, err := from.Open(ctx, at)
		if err != nil {
			return nil, err
		}
		raw, err := io.ReadAll(io.LimitReader(file, 64<<20))
		if err = errors.Join(err, file.Close()); err != nil {
			return nil, err
		}
		image, err := checkpoint.Parse(raw, at)
		if err != nil {
			flaws = append(flaws, &Flaw{Path: at, Message: err.Error()})
			continue
		}
		for _, f := range image.Files {
			name := path.Join(path.Dir(at), f.Name)
			if digests[name] != f.Digest {
				flaws = append(flaws, &Flaw{Path: name, Message: fmt.Sprintf("the image needs the file with digest %s, and the snapshot has %q", f.Digest, digests[name])})
			}
		}
	}
	return flaws, nil
}
