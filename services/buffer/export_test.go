package buffer

import (
	"context"

	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
)

// Accept ingests trajectories of an open ledger without a stream. After an error they are delivered
// again.
func (s *Server) Accept(ctx context.Context, run string, envelopes []*trajectoryv1.TrajectoryEnvelope) (ledger.Tally, error) {
	r, done, err := s.runs.use(run)
	if err != nil {
		return ledger.Tally{}, err
	}
	defer done()
	ingester, err := r.ingest(ctx)
	if err != nil {
		return ledger.Tally{}, err
	}
	tallies, err := ingester.Put(ctx, []*trajectoryv1.TrajectoryBatch{{Trajectories: envelopes}})
	if err != nil {
		return ledger.Tally{}, err
	}
	return tallies[0], nil
}

// Stop does what Run does at its end.
func (s *Server) Stop() { s.runs.stop() }

// Entries is the number of runs that have memory.
func (s *Server) Entries() int {
	s.runs.mu.Lock()
	defer s.runs.mu.Unlock()
	return len(s.runs.byID)
}
