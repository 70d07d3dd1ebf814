package buffer

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// listDefault is how many groups ListGroups returns where no limit is given.
const listDefault = 10_000

// Server is the gRPC edge. The rules of the contract were checked before a call arrives here (libs/rpc).
type Server struct {
	bufferv1.UnimplementedBufferServiceServer
	service *Service
}

// New makes the service. The caller keeps the Store and closes it after Run.
func New(cfg Config, deps Deps) (*Server, error) {
	service, err := newService(cfg, deps)
	if err != nil {
		return nil, err
	}
	return &Server{service: service}, nil
}

// Register implements the target.
func (s *Server) Register(r grpc.ServiceRegistrar) { bufferv1.RegisterBufferServiceServer(r, s) }

// Run resumes the ingest of open ledgers and stops all ingest when ctx ends.
func (s *Server) Run(ctx context.Context) error { return s.service.run(ctx) }

// OpenLedger implements the contract.
func (s *Server) OpenLedger(ctx context.Context, req *bufferv1.OpenLedgerRequest) (*bufferv1.OpenLedgerResponse, error) {
	state, err := s.service.open(ctx, req.GetRunId(), req.GetConfig(), req.GetIncarnation())
	if err != nil {
		return nil, err
	}
	return &bufferv1.OpenLedgerResponse{State: state}, nil
}

// CloseLedger implements the contract.
func (s *Server) CloseLedger(ctx context.Context, req *bufferv1.CloseLedgerRequest) (*bufferv1.CloseLedgerResponse, error) {
	return &bufferv1.CloseLedgerResponse{}, s.service.close(ctx, req.GetRunId(), req.GetIncarnation())
}

// RecordWeights implements the contract.
func (s *Server) RecordWeights(ctx context.Context, req *bufferv1.RecordWeightsRequest) (*bufferv1.RecordWeightsResponse, error) {
	var refused []Refusal
	err := s.service.update(ctx, req.GetRunId(), func(tx Tx) (err error) {
		refused, err = record(ctx, tx, req.GetVersion(), req.GetDigest())
		return err
	})
	if err != nil {
		return nil, err
	}
	crashpoint.Here("buffer/recorded") // the digest is recorded, the controller does not know
	s.service.report(req.GetRunId(), refused)
	return &bufferv1.RecordWeightsResponse{}, nil
}

// PutTrajectories implements the contract.
func (s *Server) PutTrajectories(ctx context.Context, req *bufferv1.PutTrajectoriesRequest) (*bufferv1.PutTrajectoriesResponse, error) {
	tallies, err := s.service.put(ctx, req)
	if err != nil {
		return nil, err
	}
	return putResults(tallies), nil
}

// GetMissing implements the contract.
func (s *Server) GetMissing(ctx context.Context, req *bufferv1.GetMissingRequest) (*bufferv1.GetMissingResponse, error) {
	out := &bufferv1.GetMissingResponse{}
	return out, s.view(ctx, req.GetRunId(), func(r Reader) (err error) {
		out.Groups, err = missing(ctx, r, req.GetGroups())
		return err
	})
}

// LeaseBatch implements the contract.
func (s *Server) LeaseBatch(ctx context.Context, req *bufferv1.LeaseBatchRequest) (*bufferv1.LeaseBatchResponse, error) {
	wait := time.Duration(req.GetWaitSeconds() * float64(time.Second))
	batch, waiting, err := s.service.lease(ctx, req.GetRunId(), req.GetStep(), wait)
	if err != nil {
		return nil, err
	}
	if batch != nil {
		waiting = ""
	}
	return &bufferv1.LeaseBatchResponse{Batch: batch, WaitingFor: waiting}, nil
}

// CommitStep implements the contract.
func (s *Server) CommitStep(ctx context.Context, req *bufferv1.CommitStepRequest) (*bufferv1.CommitStepResponse, error) {
	var step *Step
	var refused []Refusal
	trim := s.service.trimmer(req.GetRunId())
	err := s.service.update(ctx, req.GetRunId(), func(tx Tx) (err error) {
		step, refused, err = commit(ctx, tx, req.GetStep(), req.GetBatchId(), req.GetWeightsDigest())
		if err == nil && req.GetTrim() {
			err = trim.record(ctx, tx, req.GetStep())
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	crashpoint.Here("buffer/committed") // the step exists, the controller does not know
	s.service.report(req.GetRunId(), refused)
	if req.GetTrim() {
		if _, err := trim.remove(ctx); err != nil {
			return nil, err
		}
	}
	return &bufferv1.CommitStepResponse{Step: stepRecord(step)}, nil
}

// GetBatch implements the contract.
func (s *Server) GetBatch(ctx context.Context, req *bufferv1.GetBatchRequest) (*bufferv1.GetBatchResponse, error) {
	out := &bufferv1.GetBatchResponse{}
	return out, s.view(ctx, req.GetRunId(), func(r Reader) error {
		step, err := r.Step(ctx, req.GetStep())
		if err != nil {
			return err
		}
		if step == nil {
			return ErrNoBatch
		}
		out.Batch, err = s.service.batch(ctx, r, step)
		return err
	})
}

// ListSteps implements the contract.
func (s *Server) ListSteps(ctx context.Context, req *bufferv1.ListStepsRequest) (*bufferv1.ListStepsResponse, error) {
	out := &bufferv1.ListStepsResponse{}
	return out, s.view(ctx, req.GetRunId(), func(r Reader) error {
		steps, err := r.Steps(ctx, req.GetFromStep())
		for _, step := range steps {
			out.Steps = append(out.Steps, stepRecord(step))
		}
		return err
	})
}

// ListGroups implements the contract.
func (s *Server) ListGroups(ctx context.Context, req *bufferv1.ListGroupsRequest) (*bufferv1.ListGroupsResponse, error) {
	out := &bufferv1.ListGroupsResponse{}
	q := GroupQuery{From: req.GetFromPosition(), States: req.GetStates(), Limit: int(req.GetLimit())}
	if q.Limit == 0 {
		q.Limit = listDefault
	}
	return out, s.view(ctx, req.GetRunId(), func(r Reader) error {
		groups, err := r.ListGroups(ctx, q)
		for _, g := range groups {
			out.Groups = append(out.Groups, r.Ledger().record(g))
		}
		return err
	})
}

// ExcludeGroups implements the contract.
func (s *Server) ExcludeGroups(ctx context.Context, req *bufferv1.ExcludeGroupsRequest) (*bufferv1.ExcludeGroupsResponse, error) {
	err := s.service.update(ctx, req.GetRunId(), func(tx Tx) error {
		if err := tx.Ledger().admit(req.GetIncarnation()); err != nil {
			return err
		}
		return exclude(ctx, tx, req.GetGroups(), req.GetReason())
	})
	crashpoint.Here("buffer/excluded") // groups are excluded, the scheduler does not know
	return &bufferv1.ExcludeGroupsResponse{}, err
}

// ReissueGroups implements the contract.
func (s *Server) ReissueGroups(ctx context.Context, req *bufferv1.ReissueGroupsRequest) (*bufferv1.ReissueGroupsResponse, error) {
	err := s.service.update(ctx, req.GetRunId(), func(tx Tx) error {
		if err := tx.Ledger().admit(req.GetIncarnation()); err != nil {
			return err
		}
		return reissue(ctx, tx, req.GetGroups())
	})
	crashpoint.Here("buffer/reissued") // attempts are open, the scheduler does not know
	return &bufferv1.ReissueGroupsResponse{}, err
}

// ReadPayloads implements the contract.
func (s *Server) ReadPayloads(req *bufferv1.ReadPayloadsRequest, stream grpc.ServerStreamingServer[bufferv1.ReadPayloadsResponse]) error {
	return s.service.payloads(stream.Context(), req.GetRunId(), req.GetStep(), func(chunk [][]byte) error {
		return stream.Send(&bufferv1.ReadPayloadsResponse{Payloads: chunk})
	})
}

// WatchLedger implements the contract.
func (s *Server) WatchLedger(req *bufferv1.WatchLedgerRequest, stream grpc.ServerStreamingServer[bufferv1.WatchLedgerResponse]) error {
	ctx := stream.Context()
	for {
		state, changed, err := s.service.state(ctx, req.GetRunId())
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
	run := req.GetRunId()
	from := Payloads{Folder: s.service.folder(run), Blobs: s.service.deps.Blobs, Artifact: s.service.fetch}
	return Export(stream.Context(), s.service.deps.Store, run, from, stream.Send)
}

// TrimPayloads implements the contract.
func (s *Server) TrimPayloads(ctx context.Context, req *bufferv1.TrimPayloadsRequest) (*bufferv1.TrimPayloadsResponse, error) {
	freed, err := s.service.trim(ctx, req.GetRunId(), req.GetThroughStep())
	if err != nil {
		return nil, err
	}
	return &bufferv1.TrimPayloadsResponse{Bytes: freed}, nil
}

// view runs fn on one consistent state.
func (s *Server) view(ctx context.Context, run string, fn func(Reader) error) error {
	return s.service.deps.Store.View(ctx, run, fn)
}

func stepRecord(s *Step) *bufferv1.StepRecord {
	return &bufferv1.StepRecord{
		Step: s.Step, BatchId: s.Batch, WeightsDigest: s.WeightsDigest, Groups: s.Groups, Samples: s.Samples, Chain: s.Chain,
		Excluded: s.Excluded, ZeroAdvantage: s.Zero, EndPosition: s.End,
	}
}
