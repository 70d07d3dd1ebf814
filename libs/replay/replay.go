// Package replay trains a run's recorded batches again and compares the weights of each step.
//
// Memory does not depend on the number of groups and samples: the batches are sorted in temporary
// files. It starts no service. A worker process (`rollout-worker replay`) reads a file that names
// the model, the batches with the files of their payloads, and the recorded digests. It begins with
// the run's model, or with the oldest snapshot after which all payloads still exist.
package replay

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/audit"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/spill"
	"github.com/rollout-rl/rollout/libs/trainstate"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Step compares the weights of one step.
type Step struct {
	Step     uint64 `json:"step"`
	Recorded string `json:"recorded"` // empty: the run did not compute it
	Replayed string `json:"replayed"`
	Samples  int    `json:"samples"`
}

// Same reports whether the replayed weights are the recorded ones, if any are.
func (s Step) Same() bool { return s.Recorded == "" || s.Recorded == s.Replayed }

// Files writes content that is not in segments to files that the worker can open.
type Files interface {
	// Artifact writes an artifact to a file.
	Artifact(ctx context.Context, content, path string) error
	// Snapshot writes a snapshot's files into a folder.
	Snapshot(ctx context.Context, s *snapshotv1.Snapshot, folder string) error
}

// Job is a run to replay.
type Job struct {
	Evidence *audit.Evidence
	Files    Files
	Worker   []string // command that starts a worker; "replay" is appended
	Threads  int      // of the learner; below 0: as many as the run's last learner had
	Scratch  string   // an empty folder
	Log      io.Writer
}

// Run replays the run. It calls report with each step, and first with the state that it begins
// with. A step with other weights ends the replay without an error. Errors have an exit code
// (exit.Error).
func (j *Job) Run(ctx context.Context, report func(Step)) error {
	spec, err := j.spec(ctx)
	if err != nil {
		return err
	}
	args := append(slices.Clone(j.Worker), "replay", "--spec", spec)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stderr = j.Log
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("start %s: %w", args[0], err)
	}
	if err := cmd.Start(); err != nil {
		return exit.New(exit.NoInput, "build it (`make build`), or name the command with --worker", "start the learner: %w", err)
	}
	different := false
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var step Step
		if err := json.Unmarshal(lines.Bytes(), &step); err != nil {
			continue // output of a library
		}
		different = different || !step.Same()
		report(step)
	}
	err = cmd.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil && !different {
		return exit.New(exit.Data, "see its last log lines", "the learner could not train the recorded batches again: %w", err)
	}
	return nil
}

// spec writes the file that the worker reads.
func (j *Job) spec(ctx context.Context) (_ string, err error) {
	e := j.Evidence
	if e.Unscheduled {
		return "", exit.New(exit.Data, "check it with `rollout audit`; a replay needs a run that `rollout run` started",
			"%s is a ledger without a run of the scheduler: no plan names the model and the algorithm to train with", e.Run.GetRunId())
	}
	if none, err := j.empty(); err != nil {
		return "", err
	} else if none {
		return "", exit.New(exit.Data, "", "run %s has no committed step", e.Run.GetRunId())
	}
	base, from, err := j.start()
	if err != nil {
		return "", err
	}
	digests := newest(e.Weights)
	head, err := j.head(ctx, base, from, digests[from])
	if err != nil {
		return "", err
	}
	samples, err := j.collect(from)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, samples.Close()) }()
	path := filepath.Join(j.Scratch, "spec.jsonl")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
	if err != nil {
		return "", fmt.Errorf("write the replay spec: %w", err)
	}
	w := json.NewEncoder(f)
	if err := w.Encode(head); err != nil {
		return "", errors.Join(err, f.Close())
	}
	return path, errors.Join(j.batches(ctx, from, samples, digests, w), f.Close())
}

// empty reports whether the run has no step.
func (j *Job) empty() (bool, error) {
	if j.Evidence.Ledger == nil {
		return true, nil
	}
	none := true
	err := j.Evidence.Rows.Steps(func(*bufferv1.StepRecord) error {
		none = false
		return errFound
	})
	if errors.Is(err, errFound) {
		err = nil
	}
	return none, err
}

// errFound ends a search.
var errFound = errors.New("found")

// start returns the snapshot to begin with and its step; nil: the model.
func (j *Job) start() (*snapshotv1.Snapshot, uint64, error) {
	e := j.Evidence
	need := uint64(0) // the last step whose payloads are deleted
	err := e.Rows.Prompts(func(p *audit.Prompt) error {
		for _, g := range p.Groups {
			if g.GetState() != bufferv1.GroupState_GROUP_STATE_EXCLUDED && slices.ContainsFunc(p.Samples, (*bufferv1.SampleRecord).GetTrimmed) {
				need = max(need, g.GetStep()) // no step reads the payloads of an excluded group
			}
		}
		return nil
	})
	if err != nil {
		return nil, 0, err
	}
	first := e.Ledger.GetConfig().GetFirstStep()
	if need == 0 && first == 0 {
		return nil, 0, nil
	}
	var best *snapshotv1.Snapshot
	for _, s := range e.Snapshots {
		usable := s.GetKind() == snapshotv1.SnapshotKind_SNAPSHOT_KIND_TRAIN_STATE && s.GetStep() >= max(need, first)
		if usable && (best == nil || s.GetStep() < best.GetStep()) {
			best = s
		}
	}
	if best == nil {
		return nil, 0, exit.New(exit.Data, "train the next run with `snapshot.keep_payloads = true`",
			"the samples of the steps up to %d are deleted, and no snapshot of a later step exists", need)
	}
	return best, best.GetStep(), nil
}

// head returns the first line of the spec: the state to load, and its digest.
func (j *Job) head(ctx context.Context, base *snapshotv1.Snapshot, from uint64, digest string) (map[string]any, error) {
	e := j.Evidence
	plan, err := raw(e.Run.GetPlan())
	if err != nil {
		return nil, err
	}
	threads := j.Threads
	if threads < 0 {
		if threads, err = learnerThreads(e.Run.GetDirectory()); err != nil {
			return nil, err
		}
	}
	state := ""
	if base != nil {
		state = filepath.Join(j.Scratch, "state")
		if err := j.Files.Snapshot(ctx, trainstate.Without(base, trainstate.Base), state); err != nil {
			return nil, err
		}
	}
	return map[string]any{"plan": plan, "base_dir": e.Run.GetBaseDir(), "threads": threads, "state_directory": state, "step": from, "digest": digest}, nil
}

// newest returns the digest of each version in the newest lineage that has it: the steps after the
// version were trained from those weights.
func newest(weights []*bufferv1.WeightsRecord) map[uint64]string {
	digests, lineages := map[uint64]string{}, map[uint64]uint32{}
	for _, w := range weights {
		if v := w.GetVersion(); w.GetLineage() >= lineages[v] {
			digests[v], lineages[v] = w.GetDigest(), w.GetLineage()
		}
	}
	return digests
}

// learnerThreads returns the threads of the run's last learner: results depend on them.
func learnerThreads(directory string) (int, error) {
	data, err := os.ReadFile(filepath.Join(directory, "workers", "learner-0.json"))
	if err != nil {
		return 0, exit.New(exit.NoInput, "give the number of threads with --threads", "read the number of threads of the run's learner: %w", err)
	}
	var spec struct {
		Threads int `json:"threads"`
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return 0, exit.New(exit.Data, "give the number of threads with --threads", "read the learner's spec: %w", err)
	}
	return spec.Threads, nil
}

// collect returns the samples of the batches after a step, in the order of the batches.
func (j *Job) collect(from uint64) (*spill.Sorter, error) {
	samples := spill.New(j.Scratch)
	var key, value []byte
	err := j.Evidence.Rows.Prompts(func(p *audit.Prompt) error {
		for _, g := range p.Groups {
			if g.GetStep() <= from || g.GetState() != bufferv1.GroupState_GROUP_STATE_CONSUMED {
				continue
			}
			key = binary.BigEndian.AppendUint64(key[:0], g.GetStep()) // positions are in order
			for _, s := range p.Samples {
				var err error
				if value, err = (proto.MarshalOptions{}).MarshalAppend(value[:0], s); err != nil {
					return err
				}
				if err := samples.Add(key, value); err != nil {
					return err
				}
			}
			break
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, samples.Close())
	}
	return samples, nil
}

// batches writes the batch of each committed step after one.
func (j *Job) batches(ctx context.Context, from uint64, samples *spill.Sorter, digests map[uint64]string, w *json.Encoder) error {
	records, err := samples.Read()
	if err != nil {
		return err
	}
	key, value, next := records.Next()
	return j.Evidence.Rows.Steps(func(s *bufferv1.StepRecord) error {
		if s.GetStep() <= from || s.GetChain() == "" {
			return nil
		}
		var found []*bufferv1.SampleRecord
		for ; next == nil && binary.BigEndian.Uint64(key) <= s.GetStep(); key, value, next = records.Next() {
			if binary.BigEndian.Uint64(key) != s.GetStep() {
				continue
			}
			sample := &bufferv1.SampleRecord{}
			if err := proto.Unmarshal(value, sample); err != nil {
				return err
			}
			found = append(found, sample)
		}
		if next != nil && !errors.Is(next, io.EOF) {
			return next
		}
		batch, err := j.batch(ctx, s, found)
		if err != nil {
			return err
		}
		return w.Encode(map[string]any{"batch": batch, "digest": cmp.Or(digests[s.GetStep()], s.GetWeightsDigest())})
	})
}

// batch returns the batch of a step, and the files that hold its samples.
func (j *Job) batch(ctx context.Context, s *bufferv1.StepRecord, samples []*bufferv1.SampleRecord) (json.RawMessage, error) {
	e := j.Evidence
	b := &bufferv1.Batch{RunId: e.Run.GetRunId(), Step: s.GetStep(), BatchId: s.GetBatchId(), Groups: s.GetGroups(), Excluded: s.GetExcluded()}
	for _, sample := range samples {
		k, ref := sample.GetRef().GetKey(), sample.GetRef()
		if sample.GetFlaw() != "" {
			return nil, exit.New(exit.Data, "`rollout audit` lists all damage", "step %d: sample %d of group %d/%d: %s",
				s.GetStep(), k.GetSample(), k.GetEpoch(), k.GetIndex(), sample.GetFlaw())
		}
		if sample.GetSegment() > 0 {
			ref.Segment = filepath.Join(e.Ledger.GetFolder(), fmt.Sprintf("%06d.seg", sample.GetSegment()))
		} else {
			ref.Segment = filepath.Join(j.Scratch, ref.GetPayloadRef())
			if err := j.Files.Artifact(ctx, ref.GetPayloadRef(), ref.GetSegment()); err != nil {
				return nil, err
			}
			info, err := os.Stat(ref.GetSegment())
			if err != nil {
				return nil, err
			}
			ref.Offset, ref.Length = 0, uint64(info.Size())
		}
		b.Samples = append(b.Samples, ref)
	}
	if uint32(len(b.GetSamples())) != s.GetSamples() {
		return nil, exit.New(exit.Data, "`rollout audit` lists what is missing", "step %d trained on %d samples; the ledger has %d", s.GetStep(), s.GetSamples(), len(b.GetSamples()))
	}
	return raw(b)
}

func raw(m proto.Message) (json.RawMessage, error) {
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("write the replay spec: %w", err)
	}
	return text, nil
}
