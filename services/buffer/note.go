package buffer

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// note is what a segment says of the loads whose payloads are before it: their puts without payloads, so that rows which a power cut took
// can be made again in the same order.
func note(run string, loads []*load) ([]byte, error) {
	request := &bufferv1.PutTrajectoriesRequest{RunId: run}
	for _, l := range loads {
		for _, put := range l.puts {
			batch := &trajectoryv1.TrajectoryBatch{Trajectories: make([]*trajectoryv1.TrajectoryEnvelope, len(put))}
			for i := range put {
				a := &put[i]
				e := &trajectoryv1.TrajectoryEnvelope{Header: a.Header, PayloadRef: a.Ref, Crc32C: a.CRC}
				if a.Place.Segment > 0 && a.Flaw == "" {
					e.Place = &trajectoryv1.PayloadPlace{Segment: a.Place.Segment, Offset: a.Place.Offset, Length: a.Place.Length}
				}
				batch.Trajectories[i] = e
			}
			request.Puts = append(request.Puts, batch)
		}
	}
	text, err := proto.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("note of %s: %w", run, err)
	}
	return text, nil
}

// replay makes the rows again that a power cut took, from the notes beyond what the ledger counts on, and says how many samples came back.
// A note whose rows were never committed is no harm: its samples were not answered for, and come again as twins. The caller holds the
// service's lock.
func (f *feed) replay(ctx context.Context, known []segment.Tail) (samples int, err error) {
	err = segment.Notes(f.service.folder(f.run), known, func(n segment.Note) error {
		request := &bufferv1.PutTrajectoriesRequest{}
		if err := proto.Unmarshal(n.Text, request); err != nil || request.GetRunId() != f.run {
			return fmt.Errorf("note at the end of segment %d, byte %d, is not of this run", n.Tail.Segment, n.Tail.Bytes)
		}
		l := newLoad()
		for _, batch := range request.GetPuts() {
			l.puts = append(l.puts, recall(batch.GetTrajectories(), n))
		}
		return f.service.deps.Store.Update(ctx, f.run, func(tx Tx) error {
			if _, err := admit(ctx, tx, []*load{l}); err != nil {
				return err
			}
			for _, t := range l.tallies {
				samples += t.Accepted
			}
			return tx.PutSegment(ctx, Segment{Number: n.Tail.Segment, Bytes: n.Tail.Bytes})
		})
	})
	if h := f.service.hubs[f.run]; h != nil {
		h.forget() // whatever was read before
	}
	return samples, err
}

// recall is the arrivals of a put that was noted.
func recall(envelopes []*trajectoryv1.TrajectoryEnvelope, n segment.Note) []Arrival {
	arrivals := make([]Arrival, len(envelopes))
	for i, e := range envelopes {
		a := &arrivals[i]
		*a = Arrival{Header: e.GetHeader(), Ref: e.GetPayloadRef(), CRC: e.GetCrc32C()}
		place := segment.Place{Segment: e.GetPlace().GetSegment(), Offset: e.GetPlace().GetOffset(), Length: e.GetPlace().GetLength()}
		held := n.Held[place.Offset]
		switch {
		case !kept(e.GetHeader().GetOutcome()), e.GetPayloadRef() != "":
		case place.Segment != n.Tail.Segment, held != segment.Held{Length: place.Length, CRC: a.CRC}:
			a.Flaw = ReasonPayloadMissing
		default:
			a.Place = place
		}
	}
	return arrivals
}
