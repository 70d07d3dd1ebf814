package buffer

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	"github.com/rollout-rl/rollout/services/buffer/ledger"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// cutGroups is the number of groups that one message of a cut has at most.
const cutGroups = 256

// CutLedger implements the contract.
func (s *Server) CutLedger(req *bufferv1.CutLedgerRequest, stream grpc.ServerStreamingServer[bufferv1.CutLedgerResponse]) (err error) {
	ctx := stream.Context()
	c := &cut{}
	if err := s.store.View(ctx, req.GetRunId(), func(r ledger.Reader) error { return c.read(ctx, r) }); err != nil {
		return err
	}
	if err := stream.Send(c.first); err != nil {
		return err
	}
	files := segment.NewReader(s.cfg.folder(req.GetRunId()))
	defer func() { err = errors.Join(err, files.Close()) }()
	of := 0
	for groups := range slices.Chunk(c.groups, cutGroups) {
		out := &bufferv1.CutLedgerResponse{}
		size := 0
		for _, g := range groups {
			record := c.ledger.GroupMessage(g)
			out.Groups = append(out.Groups, record)
			for ; of < len(c.samples) && c.samples[of].Position == g.Position; of++ {
				a := &c.samples[of]
				payload, err := s.payloads.one(ctx, files, &c.ledger, c.ledger.Step, a)
				if err != nil {
					return err
				}
				ref := c.ledger.SampleMessage(a)
				ref.PayloadRef, ref.Offset, ref.Length = "", c.bytes, uint64(len(payload))
				c.bytes += uint64(len(payload))
				out.Samples = append(out.Samples, &bufferv1.SampleRecord{
					Ref: ref, MinVersion: a.MinVersion, ReceiptVersion: a.ReceiptVersion, ReceiptDigest: a.ReceiptDigest,
				})
				out.Payloads = append(out.Payloads, payload)
				if size += len(payload); size > chunkBytes {
					if err := stream.Send(out); err != nil {
						return err
					}
					out, size = &bufferv1.CutLedgerResponse{}, 0
				}
			}
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
	return nil
}

// cut is the part of a ledger that no committed step has consumed, at one moment.
type cut struct {
	ledger  ledger.Ledger
	first   *bufferv1.CutLedgerResponse
	groups  []*ledger.Group
	samples []ledger.Sample // of groups that can still be consumed, by position
	bytes   uint64          // of the payloads that were sent
}

func (c *cut) read(ctx context.Context, r ledger.Reader) error {
	c.ledger = *r.Ledger()
	state, err := ledger.StateMessage(ctx, r)
	if err != nil {
		return err
	}
	from, err := ledger.Unconsumed(ctx, r)
	if err != nil {
		return err
	}
	if c.groups, err = r.ListGroups(ctx, ledger.GroupQuery{From: from}); err != nil {
		return err
	}
	c.samples = nil
	var positions []uint64
	for _, g := range c.groups {
		passed := g.State == ledger.Consumed || g.State == ledger.Excluded && g.Step > 0 && g.Step <= c.ledger.Step
		if !passed {
			positions = append(positions, g.Position)
		}
	}
	for some := range slices.Chunk(positions, exportPositions) {
		samples, err := r.Samples(ctx, some)
		if err != nil {
			return err
		}
		c.samples = append(c.samples, samples...)
	}
	config := c.ledger.Config
	c.first = &bufferv1.CutLedgerResponse{Ledger: &bufferv1.LedgerRecord{Config: config, State: state, Chain: c.ledger.Chain}}
	c.first.Ledger.FirstUnconsumed = from
	// Open episodes have tokens of every version that is not too old.
	oldest := c.ledger.Step - min(c.ledger.Step, uint64(config.GetMaxStaleness()))
	for i := range c.samples {
		oldest = min(oldest, c.samples[i].MinVersion)
	}
	weights, err := r.ListWeights(ctx, oldest, int(c.ledger.WeightsVersion-min(oldest, c.ledger.WeightsVersion))+1)
	for _, w := range weights {
		c.first.Weights = append(c.first.Weights, &bufferv1.WeightsRecord{Version: w.Version, Digest: w.Digest, Lineage: w.Lineage})
	}
	return err
}
