package buffer

import (
	"context"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	"github.com/rollout-rl/rollout/libs/paging"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

// page is the number of rows that are read at a time.
const page = 10_000

// defaultPage is the number of rows of a page, where a request does not choose.
const defaultPage = 1000

// Server serves the contract. Validation rules of the contract are checked before a call arrives
// here (libs/rpc).
type Server struct {
	bufferv1.UnimplementedBufferServiceServer
	cfg      Config
	store    ledger.Store
	runs     *runs
	leases   *leases
	payloads *payloads
	cleaner  *cleaner
}

// New makes the service. The caller owns the Store and closes it after Run.
func New(cfg Config, deps Deps) (*Server, error) {
	if err := cfg.complete(&deps); err != nil {
		return nil, err
	}
	runs := newRuns(cfg, deps)
	return &Server{
		cfg: cfg, store: deps.Store, runs: runs, leases: &leases{cfg: cfg, life: runs.life},
		payloads: &payloads{cfg: cfg, store: deps.Store, blobs: deps.Blobs, artifacts: deps.Artifacts},
		cleaner:  newCleaner(deps),
	}, nil
}

// Register implements the target.
func (s *Server) Register(r grpc.ServiceRegistrar) { bufferv1.RegisterBufferServiceServer(r, s) }

// Run resumes the ingest of open ledgers, and stops all ingest when ctx ends. It deletes the
// payloads that are not needed any more.
func (s *Server) Run(ctx context.Context) error {
	var wait sync.WaitGroup
	defer wait.Wait()
	wait.Go(func() { s.cleaner.serve(ctx) })
	return s.runs.serve(ctx)
}

// OpenLedger implements the contract.
func (s *Server) OpenLedger(ctx context.Context, req *bufferv1.OpenLedgerRequest) (*bufferv1.OpenLedgerResponse, error) {
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return nil, err
	}
	defer done()
	state, err := r.create(ctx, req.GetConfig(), req.GetFence())
	if err != nil {
		return nil, err
	}
	return &bufferv1.OpenLedgerResponse{State: state}, nil
}

// CloseLedger implements the contract.
func (s *Server) CloseLedger(ctx context.Context, req *bufferv1.CloseLedgerRequest) (*bufferv1.CloseLedgerResponse, error) {
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return nil, err
	}
	defer done()
	return &bufferv1.CloseLedgerResponse{}, r.close(ctx, req.GetFence())
}

// RecordWeights implements the contract.
func (s *Server) RecordWeights(ctx context.Context, req *bufferv1.RecordWeightsRequest) (*bufferv1.RecordWeightsResponse, error) {
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return nil, err
	}
	defer done()
	var recorded ledger.Recorded
	err = r.Update(ctx, func(tx ledger.Tx) (err error) {
		if err := tx.Admit(ctx, req.GetFence()); err != nil {
			return err
		}
		recorded, err = ledger.RecordWeights(ctx, tx, req.GetVersion(), req.GetDigest(), req.GetOldLineage())
		return err
	})
	if err != nil {
		return nil, err
	}
	crashpoint.Here("buffer/recorded") // the digest is recorded, the controller does not know
	r.reporter.Refused(recorded.Refused)
	return &bufferv1.RecordWeightsResponse{
		Lineage: recorded.Lineage, Forked: recorded.Forked, LostDigest: recorded.Lost, Reissued: recorded.Reissued,
	}, nil
}

// PutTrajectories implements the contract.
func (s *Server) PutTrajectories(ctx context.Context, req *bufferv1.PutTrajectoriesRequest) (*bufferv1.PutTrajectoriesResponse, error) {
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return nil, err
	}
	defer done()
	ingester, err := r.ingest(ctx)
	if err != nil {
		return nil, err
	}
	tallies, err := ingester.Put(ctx, req.GetPuts())
	if err != nil {
		return nil, err
	}
	out := &bufferv1.PutTrajectoriesResponse{Results: make([]*bufferv1.PutResult, len(tallies))}
	for i, t := range tallies {
		out.Results[i] = &bufferv1.PutResult{Accepted: uint32(t.Accepted), Duplicates: uint32(t.Duplicates), Failed: uint32(t.Failed)}
		for _, refusal := range t.Refused {
			out.Results[i].Refused = append(out.Results[i].Refused, &bufferv1.PutRefusal{Trajectory: uint32(refusal.Number), Reason: refusal.Reason})
		}
	}
	return out, nil
}

// GetMissing implements the contract.
func (s *Server) GetMissing(ctx context.Context, req *bufferv1.GetMissingRequest) (*bufferv1.GetMissingResponse, error) {
	out := &bufferv1.GetMissingResponse{}
	return out, s.store.View(ctx, req.GetRunId(), func(r ledger.Reader) (err error) {
		out.Groups, err = ledger.Missing(ctx, r, req.GetGroups())
		return err
	})
}

// LeaseBatch implements the contract.
func (s *Server) LeaseBatch(ctx context.Context, req *bufferv1.LeaseBatchRequest) (*bufferv1.LeaseBatchResponse, error) {
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return nil, err
	}
	defer done()
	wait := time.Duration(req.GetWaitSeconds() * float64(time.Second))
	batch, waits, err := s.leases.lease(ctx, r, req.GetStep(), wait, req.GetFence())
	if err != nil {
		return nil, err
	}
	if batch != nil {
		waits = nil
		r.origins.Link(ctx, func(yield func(*trajectoryv1.TrajectoryKey) bool) {
			for _, sample := range batch.GetSamples() {
				if !yield(sample.GetKey()) {
					return
				}
			}
		})
	}
	return &bufferv1.LeaseBatchResponse{Batch: batch, Waits: waits}, nil
}

// CommitStep implements the contract.
func (s *Server) CommitStep(ctx context.Context, req *bufferv1.CommitStepRequest) (*bufferv1.CommitStepResponse, error) {
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return nil, err
	}
	defer done()
	var step *ledger.Step
	var refused []ledger.Refusal
	var trimmed ledger.Trimmed
	err = r.Update(ctx, func(tx ledger.Tx) (err error) {
		if err := tx.Admit(ctx, req.GetFence()); err != nil {
			return err
		}
		step, refused, err = ledger.Commit(ctx, tx, req.GetStep(), req.GetBatchId(), req.GetWeightsDigest())
		if err == nil && req.GetTrim() {
			trimmed, err = ledger.Trim(ctx, tx, req.GetStep())
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	crashpoint.Here("buffer/committed") // the step exists, the controller does not know
	r.reporter.Refused(refused)
	if _, err := s.payloads.delete(ctx, r.id, trimmed); err != nil {
		return nil, err
	}
	if req.GetTrim() {
		s.cleaner.soon()
	}
	return &bufferv1.CommitStepResponse{Step: step.Message()}, nil
}

// GetBatch implements the contract.
func (s *Server) GetBatch(ctx context.Context, req *bufferv1.GetBatchRequest) (*bufferv1.GetBatchResponse, error) {
	out := &bufferv1.GetBatchResponse{}
	return out, s.store.View(ctx, req.GetRunId(), func(r ledger.Reader) error {
		step, err := r.Step(ctx, req.GetStep())
		if err != nil {
			return err
		}
		if step == nil {
			return ledger.ErrNoBatch
		}
		out.Batch, err = s.leases.batch(ctx, r, step)
		return err
	})
}

// ListSteps implements the contract.
func (s *Server) ListSteps(ctx context.Context, req *bufferv1.ListStepsRequest) (*bufferv1.ListStepsResponse, error) {
	last, err := paging.Number(req.GetPageToken())
	if err != nil {
		return nil, err
	}
	size := paging.Size(req.GetPageSize(), defaultPage)
	q := ledger.StepQuery{From: req.GetFromStep(), Limit: size + 1, Newest: req.GetNewest()}
	switch {
	case q.Newest:
		q.To = last
	case last > 0:
		q.From = max(q.From, last+1)
	}
	out := &bufferv1.ListStepsResponse{}
	return out, s.store.View(ctx, req.GetRunId(), func(r ledger.Reader) error {
		steps, err := r.Steps(ctx, q)
		out.Steps, out.NextPageToken = nil, ""
		if q.Newest && len(steps) > size {
			steps = steps[1:]
			out.NextPageToken = strconv.FormatUint(steps[0].Step, 10)
		} else {
			steps, out.NextPageToken = paging.Cut(steps, size, func(s *ledger.Step) string { return strconv.FormatUint(s.Step, 10) })
		}
		for _, step := range steps {
			out.Steps = append(out.Steps, step.Message())
		}
		return err
	})
}

// positions returns the first position of a page of groups, and the size of the page. A token is
// the position after the previous page.
func positions(req interface {
	GetFromPosition() uint64
	GetPageToken() string
	GetPageSize() uint32
}) (from uint64, size int, err error) {
	next, err := paging.Number(req.GetPageToken())
	return max(req.GetFromPosition(), next), paging.Size(req.GetPageSize(), defaultPage), err
}

func nextPosition(g *ledger.Group) string { return strconv.FormatUint(g.Position+1, 10) }

// ListGroups implements the contract.
func (s *Server) ListGroups(ctx context.Context, req *bufferv1.ListGroupsRequest) (*bufferv1.ListGroupsResponse, error) {
	from, size, err := positions(req)
	if err != nil {
		return nil, err
	}
	out := &bufferv1.ListGroupsResponse{}
	q := ledger.GroupQuery{From: from, States: req.GetStates(), Limit: size + 1}
	return out, s.store.View(ctx, req.GetRunId(), func(r ledger.Reader) error {
		groups, err := r.ListGroups(ctx, q)
		groups, out.NextPageToken = paging.Cut(groups, size, nextPosition)
		out.Groups = nil
		for _, g := range groups {
			out.Groups = append(out.Groups, r.Ledger().GroupMessage(g))
		}
		return err
	})
}

// ListIncompleteGroups implements the contract.
func (s *Server) ListIncompleteGroups(ctx context.Context, req *bufferv1.ListIncompleteGroupsRequest) (*bufferv1.ListIncompleteGroupsResponse, error) {
	from, size, err := positions(req)
	if err != nil {
		return nil, err
	}
	out := &bufferv1.ListIncompleteGroupsResponse{}
	return out, s.store.View(ctx, req.GetRunId(), func(r ledger.Reader) error {
		end, err := r.End(ctx)
		if err != nil {
			return err
		}
		groups, err := ledger.Incomplete(ctx, r, from, max(end, req.GetEndPosition()), size+1)
		groups, out.NextPageToken = paging.Cut(groups, size, nextPosition)
		out.Groups, out.EndPosition = nil, end
		for _, g := range groups {
			out.Groups = append(out.Groups, r.Ledger().GroupMessage(g))
		}
		return err
	})
}

// ExcludeGroups implements the contract.
func (s *Server) ExcludeGroups(ctx context.Context, req *bufferv1.ExcludeGroupsRequest) (*bufferv1.ExcludeGroupsResponse, error) {
	err := s.decide(ctx, req.GetRunId(), req.GetFence(), func(tx ledger.Tx) error {
		return ledger.Exclude(ctx, tx, req.GetGroups(), req.GetReason())
	})
	crashpoint.Here("buffer/excluded") // groups are excluded, the scheduler does not know
	return &bufferv1.ExcludeGroupsResponse{}, err
}

// ReissueGroups implements the contract.
func (s *Server) ReissueGroups(ctx context.Context, req *bufferv1.ReissueGroupsRequest) (*bufferv1.ReissueGroupsResponse, error) {
	err := s.decide(ctx, req.GetRunId(), req.GetFence(), func(tx ledger.Tx) error {
		return ledger.Reissue(ctx, tx, req.GetGroups())
	})
	crashpoint.Here("buffer/reissued") // attempts are open, the scheduler does not know
	return &bufferv1.ReissueGroupsResponse{}, err
}

// decide runs fn unless a former leader has decided it.
func (s *Server) decide(ctx context.Context, run string, by *fencev1.Fence, fn func(ledger.Tx) error) error {
	r, done, err := s.runs.use(run)
	if err != nil {
		return err
	}
	defer done()
	return r.Update(ctx, func(tx ledger.Tx) error {
		if err := tx.Admit(ctx, by); err != nil {
			return err
		}
		return fn(tx)
	})
}

// ReadPayloads implements the contract.
func (s *Server) ReadPayloads(req *bufferv1.ReadPayloadsRequest, stream grpc.ServerStreamingServer[bufferv1.ReadPayloadsResponse]) error {
	return s.payloads.read(stream.Context(), req.GetRunId(), req.GetStep(), func(chunk [][]byte) error {
		return stream.Send(&bufferv1.ReadPayloadsResponse{Payloads: chunk})
	})
}

// WatchLedger implements the contract.
func (s *Server) WatchLedger(req *bufferv1.WatchLedgerRequest, stream grpc.ServerStreamingServer[bufferv1.WatchLedgerResponse]) error {
	ctx := stream.Context()
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return err
	}
	defer done()
	for {
		state, changed, err := r.current(ctx)
		if err != nil {
			return err
		}
		if err := stream.Send(&bufferv1.WatchLedgerResponse{State: state}); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ExportLedger implements the contract.
func (s *Server) ExportLedger(req *bufferv1.ExportLedgerRequest, stream grpc.ServerStreamingServer[bufferv1.ExportLedgerResponse]) error {
	from := Payloads{Folder: s.cfg.folder(req.GetRunId()), Blobs: s.payloads.blobs, Artifact: s.payloads.artifact, Scratch: s.cfg.Segments}
	return Export(stream.Context(), s.store, req.GetRunId(), from, stream.Send)
}

// TrimPayloads implements the contract.
func (s *Server) TrimPayloads(ctx context.Context, req *bufferv1.TrimPayloadsRequest) (*bufferv1.TrimPayloadsResponse, error) {
	r, done, err := s.runs.use(req.GetRunId())
	if err != nil {
		return nil, err
	}
	defer done()
	var trimmed ledger.Trimmed
	err = r.Update(ctx, func(tx ledger.Tx) (err error) {
		if err := tx.Admit(ctx, req.GetFence()); err != nil {
			return err
		}
		trimmed, err = ledger.Trim(ctx, tx, req.GetThroughStep())
		return err
	})
	if err != nil {
		return nil, err
	}
	freed, err := s.payloads.delete(ctx, r.id, trimmed)
	if err != nil {
		return nil, err
	}
	s.cleaner.soon()
	return &bufferv1.TrimPayloadsResponse{Bytes: freed}, nil
}
