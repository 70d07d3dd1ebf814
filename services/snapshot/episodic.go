package snapshot

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protodelim"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/trainstate"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Episode is an open episode after its last completed turn.
type Episode = snapshotv1.Episode

// EpisodePlace is where an episode is in the order of a list. The zero value with sample -1 is
// before the first one.
type EpisodePlace struct {
	Epoch  uint32
	Index  uint64
	Sample int64
}

// EpisodeStore keeps the open episodes of runs.
type EpisodeStore interface {
	// SaveEpisodes inserts or replaces episodes. One of a later attempt, or with as many turns, stays.
	// by as in Store.Admit; nil: a worker saves its own. fence.ErrDeleted.
	SaveEpisodes(ctx context.Context, run string, episodes []*Episode, by *fencev1.Fence) error
	// Episodes returns the episodes of a run after a place, by epoch, index, and sample.
	Episodes(ctx context.Context, run string, after EpisodePlace, limit int) ([]*Episode, error)
	// EpisodesOf returns the episodes of groups.
	EpisodesOf(ctx context.Context, run string, groups []*snapshotv1.EpisodeGroup) ([]*Episode, error)
	// DropEpisodes deletes the episodes of groups.
	DropEpisodes(ctx context.Context, run string, groups []*snapshotv1.EpisodeGroup) error
	// DropRun deletes the episodes of a run, which gets none from then on, and no snapshots except
	// imported ones. by as in Store.Admit.
	DropRun(ctx context.Context, run string, by *fencev1.Fence) error
}

const (
	// openEpisodes is the file of an episodic snapshot.
	openEpisodes = trainstate.Episodes + "/open.binpb"
	// episodePage is the number of episodes that are read at a time.
	episodePage = 64
	// maxEpisode bounds the memory that a damaged file can claim.
	maxEpisode = 64 << 20
)

// ErrNotSaved reports that a run has no episodes that a snapshot could contain.
var ErrNotSaved = rpcerr.New(codes.FailedPrecondition, "EPISODES_NOT_SAVED", "the environment of the run saves no episodes")

// savesEpisodes returns ErrNotSaved unless the environment of a run saves its open episodes.
func savesEpisodes(run *runv1.Run) error {
	if run.GetPlan().GetSavesEpisodes() {
		return nil
	}
	environment := run.GetPlan().GetConfig().GetEnvironment()
	name, fix := environment.GetPath(), "define `state_dict(self)` and `load_state_dict(self, state)` in its `SingleEpisode`, and start the run again with a new plan; or take"
	if name == "" {
		name, fix = cmp.Or(environment.GetKind(), singleTurn), "take"
	}
	return ErrNotSaved.With("run", run.GetRunId()).With("environment", name).
		WithMessage("the environment %s of %s saves no episodes, so that a snapshot of kind episodic would contain none", name, run.GetRunId()).
		Fix(fix + " one of kind buffer: `rollout snapshot create " + run.GetRunId() + " --kind buffer`")
}

// singleTurn is the environment of a configuration that names none.
const singleTurn = "single_turn"

// episodicKind handles the open episodes of a run. A run that is restored from one continues them.
type episodicKind struct {
	bufferKind
	store EpisodeStore
}

// Capture implements Handler.
func (k episodicKind) Capture(ctx context.Context, s *Snapshot, to Folder) error {
	if err := k.bufferKind.Capture(ctx, s, to); err != nil {
		return err
	}
	file, err := to.Write(openEpisodes, func(w io.Writer) error {
		return eachEpisode(ctx, k.store, s.GetRunId(), func(e *Episode) error {
			_, err := protodelim.MarshalTo(w, e)
			return err
		})
	})
	s.Files = append(s.Files, file)
	return err
}

// Check implements Handler.
func (k episodicKind) Check(s *Snapshot, bad *rpcerr.Error) *rpcerr.Error {
	if !trainstate.Has(s, openEpisodes) {
		bad = bad.Field("snapshot.files", "must have the file "+openEpisodes)
	}
	return k.bufferKind.Check(s, bad)
}

// Verify implements Handler: each episode can be read.
func (k episodicKind) Verify(ctx context.Context, s *Snapshot, from Files) ([]*Flaw, error) {
	flaws, err := k.bufferKind.Verify(ctx, s, from)
	if err != nil {
		return nil, err
	}
	at, err := readEpisodes(ctx, from, func(*Episode) error { return nil })
	if errors.Is(err, errEpisode) {
		return append(flaws, &Flaw{Path: openEpisodes, Offset: at, Message: err.Error()}), nil
	}
	return flaws, err
}

// errEpisode is the error of an episode that cannot be read.
var errEpisode = errors.New("an episode cannot be read")

// readEpisodes passes the episodes of a snapshot to fn. It returns the offset of the episode that
// it read last.
func readEpisodes(ctx context.Context, from Files, fn func(*Episode) error) (offset uint64, err error) {
	file, err := from.Open(ctx, openEpisodes)
	if err != nil {
		return 0, err
	}
	defer func() { _ = file.Close() }()
	in := &offsetReader{Reader: bufio.NewReader(file)}
	for {
		at, e := in.offset, &Episode{}
		err := protodelim.UnmarshalOptions{MaxSize: maxEpisode}.UnmarshalFrom(in, e)
		if errors.Is(err, io.EOF) {
			return at, nil
		}
		if err != nil {
			return at, fmt.Errorf("%w: %w", errEpisode, err)
		}
		if err := fn(e); err != nil {
			return at, err
		}
	}
}

// eachEpisode passes the open episodes of a run to fn.
func eachEpisode(ctx context.Context, store EpisodeStore, run string, fn func(*Episode) error) error {
	for after := (EpisodePlace{Sample: -1}); ; {
		page, err := store.Episodes(ctx, run, after, episodePage)
		if err != nil || len(page) == 0 {
			return err
		}
		for _, e := range page {
			after = placeOf(e)
			if err := fn(e); err != nil {
				return err
			}
		}
	}
}

func placeOf(e *Episode) EpisodePlace {
	return EpisodePlace{Epoch: e.GetKey().GetEpoch(), Index: e.GetKey().GetIndex(), Sample: int64(e.GetKey().GetSample())}
}

func (p EpisodePlace) before(q EpisodePlace) bool {
	switch {
	case p.Epoch != q.Epoch:
		return p.Epoch < q.Epoch
	case p.Index != q.Index:
		return p.Index < q.Index
	}
	return p.Sample < q.Sample
}

// SaveEpisodes implements the contract.
func (s *Server) SaveEpisodes(ctx context.Context, req *snapshotv1.SaveEpisodesRequest) (*snapshotv1.SaveEpisodesResponse, error) {
	return &snapshotv1.SaveEpisodesResponse{}, s.svc.Store.SaveEpisodes(ctx, req.GetRunId(), req.GetEpisodes(), nil)
}

// DropEpisodes implements the contract.
func (s *Server) DropEpisodes(ctx context.Context, req *snapshotv1.DropEpisodesRequest) (*snapshotv1.DropEpisodesResponse, error) {
	return &snapshotv1.DropEpisodesResponse{}, s.svc.Store.DropEpisodes(ctx, req.GetRunId(), req.GetGroups())
}

// ListEpisodes implements the contract.
func (s *Server) ListEpisodes(ctx context.Context, req *snapshotv1.ListEpisodesRequest) (*snapshotv1.ListEpisodesResponse, error) {
	if (req.GetRunId() == "") == (req.GetSnapshotId() == "") {
		return nil, ErrInvalid.WithMessage("name a run or a snapshot").Field("run_id", "must be set, or snapshot_id")
	}
	after := EpisodePlace{Sample: -1}
	if token := req.GetPageToken(); token != "" {
		if _, err := fmt.Sscanf(token, "%d/%d/%d", &after.Epoch, &after.Index, &after.Sample); err != nil {
			return nil, paging.ErrToken(token)
		}
	}
	size := paging.Size(req.GetPageSize(), s.cfg.PageSize)
	wanted := map[[2]uint64]bool{}
	for _, g := range req.GetGroups() {
		wanted[[2]uint64{uint64(g.GetEpoch()), g.GetIndex()}] = true
	}
	out := &snapshotv1.ListEpisodesResponse{}
	switch {
	case req.GetSnapshotId() != "":
		err := s.svc.episodesOf(ctx, req.GetSnapshotId(), func(e *Episode) error {
			named := len(wanted) == 0 || wanted[[2]uint64{uint64(e.GetKey().GetEpoch()), e.GetKey().GetIndex()}]
			if named && after.before(placeOf(e)) && (len(wanted) > 0 || len(out.Episodes) <= size) {
				out.Episodes = append(out.Episodes, e)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	case len(wanted) > 0:
		found, err := s.svc.Store.EpisodesOf(ctx, req.GetRunId(), req.GetGroups())
		return &snapshotv1.ListEpisodesResponse{Episodes: found}, err
	default:
		found, err := s.svc.Store.Episodes(ctx, req.GetRunId(), after, size+1)
		if err != nil {
			return nil, err
		}
		out.Episodes = found
	}
	if len(wanted) == 0 && len(out.Episodes) > size {
		out.Episodes = out.Episodes[:size]
		p := placeOf(out.Episodes[size-1])
		out.NextPageToken = fmt.Sprintf("%d/%d/%d", p.Epoch, p.Index, p.Sample)
	}
	return out, nil
}

// AdoptEpisodes implements the contract.
func (s *Server) AdoptEpisodes(ctx context.Context, req *snapshotv1.AdoptEpisodesRequest) (*snapshotv1.AdoptEpisodesResponse, error) {
	if err := s.svc.Store.Admit(ctx, req.GetRunId(), req.GetFence()); err != nil {
		return nil, err
	}
	snap, err := s.svc.Store.Get(ctx, req.GetSnapshotId())
	if err != nil || !trainstate.Has(snap, openEpisodes) {
		return &snapshotv1.AdoptEpisodesResponse{}, err
	}
	return &snapshotv1.AdoptEpisodesResponse{}, s.svc.episodesOf(ctx, snap.GetSnapshotId(), func(e *Episode) error {
		e = proto.CloneOf(e)
		e.Key.RunId = req.GetRunId()
		return s.svc.Store.SaveEpisodes(ctx, req.GetRunId(), []*Episode{e}, req.GetFence())
	})
}

// episodesOf passes the episodes of a snapshot that the caller sees to fn, by epoch, index, and
// sample.
func (s *service) episodesOf(ctx context.Context, idOrPrefix string, fn func(*Episode) error) error {
	s.files.RLock()
	defer s.files.RUnlock()
	snap, err := s.get(ctx, idOrPrefix)
	if err != nil {
		return err
	}
	if !trainstate.Has(snap, openEpisodes) {
		return ErrInvalid.With("snapshot", snap.GetSnapshotId()).WithMessage("snapshot %s is of kind %s and has no episodes", snap.GetSnapshotId(), kindName(snap.GetKind())).
			Fix("name a snapshot of kind episodic: `rollout snapshot create RUN --kind episodic`")
	}
	_, err = readEpisodes(ctx, Files{s.Artifacts, snap}, fn)
	return err
}
