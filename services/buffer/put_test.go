package buffer_test

import (
	"encoding/binary"
	"os"
	"testing"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// put puts groups, each for itself, in one call.
func (s *bench) put(groups ...[]*trajectoryv1.TrajectoryEnvelope) ([]*bufferv1.PutResult, error) {
	req := &bufferv1.PutTrajectoriesRequest{RunId: run}
	for _, g := range groups {
		req.Puts = append(req.Puts, &trajectoryv1.TrajectoryBatch{Trajectories: g})
	}
	r, err := s.client.PutTrajectories(s.Context(), req)
	return r.GetResults(), err
}

func (s *bench) mustPut(groups ...[]*trajectoryv1.TrajectoryEnvelope) []*bufferv1.PutResult {
	s.Helper()
	results, err := s.put(groups...)
	if err != nil {
		s.Fatal(err)
	}
	return results
}

func (s *bench) lend() *bufferv1.LendSegmentResponse {
	s.Helper()
	lent, err := s.client.LendSegment(s.Context(), &bufferv1.LendSegmentRequest{RunId: run})
	if err != nil {
		s.Fatal(err)
	}
	return lent
}

// writeInto appends payloads to a lent file, as a producer does, and names their places instead.
func (s *bench) writeInto(lent *bufferv1.LendSegmentResponse, group []*trajectoryv1.TrajectoryEnvelope) []*trajectoryv1.TrajectoryEnvelope {
	s.Helper()
	f, err := os.OpenFile(lent.GetPath(), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		s.Fatal(err)
	}
	defer f.Close()
	for _, e := range group {
		info, err := f.Stat()
		if err != nil {
			s.Fatal(err)
		}
		record := binary.LittleEndian.AppendUint32(nil, uint32(len(e.GetPayload())))
		record = binary.LittleEndian.AppendUint32(record, e.GetCrc32C())
		if _, err := f.Write(append(record, e.GetPayload()...)); err != nil {
			s.Fatal(err)
		}
		e.Place = &trajectoryv1.PayloadPlace{Segment: lent.GetSegment(), Offset: uint64(info.Size()) + segment.HeaderBytes, Length: uint64(len(e.GetPayload())), Lending: lent.GetLending()}
		e.Payload = nil
	}
	return group
}

func ready(t testing.TB) *bench {
	t.Helper()
	s := setup(t)
	s.open(ledgerConfig())
	s.record(0)
	return s
}

func TestAPutIsInTheLedgerWhenItReturns(t *testing.T) {
	t.Parallel()
	s := ready(t)
	results := s.mustPut(groupOf(0, 0, 0), groupOf(1, 0, 0)[:1])
	if len(results) != 2 || results[0].GetAccepted() != size || results[1].GetAccepted() != 1 {
		t.Fatalf("%v", results)
	}
	s.restart()
	again := s.mustPut(groupOf(0, 0, 0), groupOf(1, 0, 0))
	if again[0].GetDuplicates() != size || again[1].GetDuplicates() != 1 || again[1].GetAccepted() != size-1 {
		t.Errorf("%v", again)
	}
	batch := s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
	s.commit(batch)
}

func TestPutsAreAnsweredOneByOne(t *testing.T) {
	t.Parallel()
	s := ready(t)
	spoiled := groupOf(1, 0, 0)
	spoiled[2].Crc32C++
	broken := groupOf(2, 0, 0)
	failed(broken[1], trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, "REWARD_TIMEOUT")
	results := s.mustPut(groupOf(0, 0, 0), spoiled, broken[:2])
	refused := results[1].GetRefused()
	if results[0].GetAccepted() != size || len(refused) != 1 || refused[0].GetTrajectory() != 2 || refused[0].GetReason() != "PAYLOAD_CORRUPT" {
		t.Errorf("%v", results)
	}
	if results[2].GetFailed() != 1 {
		t.Errorf("%v", results[2])
	}
}

func TestProducersWriteIntoLentSegments(t *testing.T) {
	t.Parallel()
	s := ready(t)
	one, two := s.lend(), s.lend()
	if info, err := os.Stat(one.GetPath()); err != nil || one.GetSegment() == two.GetSegment() || info.Size() != int64(one.GetOffset()) {
		t.Fatalf("%v %v: %v", one, two, err)
	}
	s.mustPut(s.writeInto(one, groupOf(0, 0, 0)))
	s.mustPut(s.writeInto(two, groupOf(1, 0, 0)[:2]), groupOf(1, 0, 0)[2:]) // the rest inline
	s.restart()
	batch := s.lease(1)
	if got := batch.GetSamples()[0].GetSegment(); got != one.GetPath() {
		t.Errorf("payload in %s, was written to %s", got, one.GetPath())
	}
	got, err := s.payloads(1)
	if err != nil || len(got) != 2*size || got[size+1].GetReward() != 1 {
		t.Errorf("%d payloads, %v", len(got), err)
	}
}

// A payload that is not what its producer says is refused, its group dissolved; no row reaches past it in its file.
func TestSpoiledRecordOfAProducer(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(f *os.File, e *trajectoryv1.TrajectoryEnvelope) error{
		"payload": func(f *os.File, e *trajectoryv1.TrajectoryEnvelope) error {
			_, err := f.WriteAt([]byte{0xff}, int64(e.GetPlace().GetOffset())+9)
			return err
		},
		"header": func(f *os.File, e *trajectoryv1.TrajectoryEnvelope) error {
			_, err := f.WriteAt([]byte{0xff}, int64(e.GetPlace().GetOffset())-segment.HeaderBytes)
			return err
		},
		"cut off": func(f *os.File, e *trajectoryv1.TrajectoryEnvelope) error {
			return f.Truncate(int64(e.GetPlace().GetOffset()) + 5)
		},
		"never there":  func(_ *os.File, e *trajectoryv1.TrajectoryEnvelope) error { e.Place.Offset += 1 << 20; return nil },
		"in the magic": func(_ *os.File, e *trajectoryv1.TrajectoryEnvelope) error { e.Place.Offset = 4; return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := ready(t)
			lent := s.lend()
			s.mustPut(s.writeInto(lent, groupOf(0, 0, 0)))
			group := s.writeInto(lent, groupOf(1, 0, 0))
			f, err := os.OpenFile(lent.GetPath(), os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := spoil(f, group[size-1]); err != nil {
				t.Fatal(err)
			}
			if results, err := s.put(group[size-1:]); err != nil || len(results[0].GetRefused()) != 1 || results[0].GetRefused()[0].GetReason() != "PAYLOAD_CORRUPT" {
				t.Fatalf("%v %v", results, err)
			}
			if _, err := s.put(group[:1]); rpcerr.Reason(err) != "SEGMENT_NOT_LENT" {
				t.Errorf("the file is used on: %v", err)
			}
			s.mustPut(groupOf(1, 1, 0))
			s.lease(1)
			if got, err := s.payloads(1); err != nil || len(got) != 2*size {
				t.Errorf("%d payloads, %v", len(got), err)
			}
		})
	}
}

// What was written and not put is gone after a restart; the producer hears that it must begin anew.
func TestLendingEndsWithTheBuffer(t *testing.T) {
	t.Parallel()
	s := ready(t)
	lent, unused := s.lend(), s.lend()
	s.mustPut(s.writeInto(lent, groupOf(0, 0, 0)))
	torn := s.writeInto(lent, groupOf(1, 0, 0))
	s.restart()
	if _, err := s.put(torn); rpcerr.Reason(err) != "SEGMENT_NOT_LENT" {
		t.Errorf("%v", err)
	}
	next := s.lend()
	if next.GetSegment() == lent.GetSegment() {
		t.Errorf("%v is lent twice", next)
	}
	if info, err := os.Stat(unused.GetPath()); err == nil && next.GetPath() != unused.GetPath() {
		t.Errorf("a file that nobody names is left: %v", info)
	}
	for _, e := range torn { // as if the number were that of the old one, as a file without a row's is
		e.GetPlace().Segment = next.GetSegment()
	}
	if _, err := s.put(torn); rpcerr.Reason(err) != "SEGMENT_NOT_LENT" {
		t.Errorf("a place of another lending: %v", err)
	}
	if _, err := s.client.PutTrajectories(t.Context(), &bufferv1.PutTrajectoriesRequest{RunId: run, Returned: []uint64{lent.GetLending()}}); err != nil {
		t.Error(err)
	}
	s.mustPut(s.writeInto(next, groupOf(1, 0, 0))) // and next is lent still
	s.commit(s.lease(1))
}

func TestFinishedSegmentsAreLentNoMore(t *testing.T) {
	t.Parallel()
	s := ready(t)
	lent := s.lend()
	s.mustPut(s.writeInto(lent, groupOf(0, 0, 0)))
	if _, err := s.client.PutTrajectories(t.Context(), &bufferv1.PutTrajectoriesRequest{RunId: run, Returned: []uint64{lent.GetLending()}}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.put(s.writeInto(lent, groupOf(1, 0, 0))); rpcerr.Reason(err) != "SEGMENT_NOT_LENT" {
		t.Errorf("%v", err)
	}
}

// A segment that a producer may still append to is not trimmed, though all that is in it is consumed.
func TestTrimLeavesLentSegments(t *testing.T) {
	t.Parallel()
	s := ready(t)
	lent := s.lend()
	s.mustPut(s.writeInto(lent, groupOf(0, 0, 0)), s.writeInto(lent, groupOf(1, 0, 0)))
	s.lend() // the highest number is another's
	s.commit(s.lease(1))
	trim := func() {
		if _, err := s.client.TrimPayloads(t.Context(), &bufferv1.TrimPayloadsRequest{RunId: run, ThroughStep: 1}); err != nil {
			t.Fatal(err)
		}
	}
	trim()
	s.mustPut(s.writeInto(lent, groupOf(2, 0, 1)), groupOf(3, 0, 1))
	s.lease(2)
	if got, err := s.payloads(2); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
}

// What a producer has closed is lent again once it is trimmed, and what is in it then is read; a segment whose producer only fell silent
// is not.
func TestTrimmedSegmentsAreLentAgain(t *testing.T) {
	t.Parallel()
	s := ready(t)
	trim := func(through uint64, returned ...uint64) {
		if _, err := s.client.PutTrajectories(t.Context(), &bufferv1.PutTrajectoriesRequest{RunId: run, Returned: returned}); err != nil {
			t.Fatal(err)
		}
		r, err := s.client.TrimPayloads(t.Context(), &bufferv1.TrimPayloadsRequest{RunId: run, ThroughStep: through})
		if err != nil || r.GetBytes() == 0 && len(returned) > 0 {
			t.Fatal(r, err)
		}
	}
	first := s.lend()
	s.mustPut(s.writeInto(first, groupOf(0, 0, 0)), s.writeInto(first, groupOf(1, 0, 0)))
	s.commit(s.lease(1))
	silent := s.lend()
	s.mustPut(s.writeInto(silent, groupOf(2, 0, 1)), s.writeInto(silent, groupOf(3, 0, 1))) // the ledger's last one is not trimmed
	trim(1, first.GetLending())
	again := s.lend()
	if again.GetInode() != first.GetInode() || again.GetSegment() == first.GetSegment() || again.GetLending() == first.GetLending() {
		t.Fatalf("%v after %v", again, first)
	}
	if _, err := s.payloads(1); rpcerr.Reason(err) != "PAYLOADS_TRIMMED" {
		t.Errorf("payloads of step 1: %v", err)
	}
	s.commit(s.lease(2))
	s.mustPut(s.writeInto(again, groupOf(4, 0, 2)), s.writeInto(again, groupOf(5, 0, 2)))
	s.lease(3)
	if got, err := s.payloads(3); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
	trim(2)
	if next := s.lend(); next.GetInode() == silent.GetInode() {
		t.Error("a segment was lent that its producer may write to")
	}
}

func TestPutsWithABucket(t *testing.T) {
	t.Parallel()
	s, _ := withBucket(t)
	if _, err := s.client.LendSegment(t.Context(), &bufferv1.LendSegmentRequest{RunId: run}); rpcerr.Reason(err) != "SEGMENTS_NOT_LENT" {
		t.Errorf("%v", err)
	}
	s.mustPut(groupOf(0, 0, 0), groupOf(1, 0, 0))
	s.moved()
	s.lease(1)
	if got, err := s.payloads(1); err != nil || len(got) != 2*size {
		t.Errorf("%d payloads, %v", len(got), err)
	}
}

func TestPutsOfALedgerThatTakesNone(t *testing.T) {
	t.Parallel()
	s := setup(t)
	if _, err := s.put(groupOf(0, 0, 0)); rpcerr.Reason(err) != "LEDGER_NOT_FOUND" {
		t.Errorf("no ledger: %v", err)
	}
	s.open(ledgerConfig())
	if _, err := s.client.CloseLedger(t.Context(), &bufferv1.CloseLedgerRequest{RunId: run}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.put(groupOf(0, 0, 0)); rpcerr.Reason(err) != "LEDGER_CLOSED" {
		t.Errorf("closed: %v", err)
	}
}

func TestAStreamOfPutsIsAnsweredInTurn(t *testing.T) {
	t.Parallel()
	s := ready(t)
	stream, err := s.client.StreamTrajectories(s.Context())
	if err != nil {
		t.Fatal(err)
	}
	send := func(name string, groups ...uint64) {
		t.Helper()
		req := &bufferv1.PutTrajectoriesRequest{RunId: name}
		for _, g := range groups {
			req.Puts = append(req.Puts, &trajectoryv1.TrajectoryBatch{Trajectories: groupOf(g, 0, 0)})
		}
		if err := stream.Send(&bufferv1.StreamTrajectoriesRequest{Put: req}); err != nil {
			t.Fatal(err)
		}
	}
	send(run, 0)
	send(run, 1, 2)
	send(run, 0)
	for _, want := range []struct{ puts, accepted int }{{1, size}, {2, size}, {1, 0}} {
		answer, err := stream.Recv()
		if err != nil || len(answer.GetAnswer().GetResults()) != want.puts || answer.GetAnswer().GetResults()[0].GetAccepted() != uint32(want.accepted) {
			t.Fatalf("%v, %v, want %v", answer, err, want)
		}
	}
	send("run-of-nobody", 3) // its refusal ends the stream
	if _, err := stream.Recv(); rpcerr.Reason(err) != "LEDGER_NOT_FOUND" {
		t.Errorf("%v", err)
	}
	s.restart()
	if got := s.export(); len(got.GetSamples()) != 3*size {
		t.Errorf("%d samples", len(got.GetSamples()))
	}
}

// A stream that nobody writes to ends with the buffer, and with its caller.
func TestAnIdleStreamHoldsNothingUp(t *testing.T) {
	t.Parallel()
	s := ready(t)
	idle, err := s.client.StreamTrajectories(s.Context())
	if err != nil {
		t.Fatal(err)
	}
	ended, err := s.client.StreamTrajectories(s.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := ended.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := ended.Recv(); ignoreEOF(err) != nil {
		t.Error(err)
	}
	s.stop()
	if _, err := idle.Recv(); err == nil {
		t.Error("a stream outlived the buffer")
	}
}
