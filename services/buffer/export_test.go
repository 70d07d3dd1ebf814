package buffer

import (
	"context"
	"fmt"
	"os"

	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// Accept ingests trajectories of an open ledger without a stream; an error means that they come again.
func (s *Server) Accept(ctx context.Context, run string, envelopes []*trajectoryv1.TrajectoryEnvelope) (Tally, error) {
	s.service.mu.Lock()
	f := s.service.feeds[run]
	s.service.mu.Unlock()
	if f == nil {
		return Tally{}, fmt.Errorf("no feed of %s", run)
	}
	l := newLoad()
	f.weigh(l, envelopes)
	if err := f.ingest(ctx, l); err != nil {
		return Tally{}, err
	}
	return l.tallies[0], nil
}

// SyncBy makes segments durable by sync, from the next start of an ingest on.
func (s *Server) SyncBy(sync func(*os.File) error) { s.service.sync = sync }

// ResumeIngest does what Run does first.
func (s *Server) ResumeIngest(run string) error { return s.service.ingest(run) }

// Stop does what Run does last.
func (s *Server) Stop() { s.service.stop() }
