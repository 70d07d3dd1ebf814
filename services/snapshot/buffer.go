package snapshot

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/trainstate"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// bufferKind handles the unconsumed groups of a ledger. A run that is restored from one leases the
// batch that the next step of the old run would have had.
type bufferKind struct {
	trainState
	buffer Ledgers
}

// Capture implements Handler.
func (b bufferKind) Capture(ctx context.Context, s *Snapshot, to Folder) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	stream, err := b.buffer.CutLedger(ctx, &bufferv1.CutLedgerRequest{RunId: s.GetRunId()})
	if err != nil {
		return err
	}
	var first *bufferv1.CutLedgerResponse
	payloads, err := os.CreateTemp(to.Dir, ".payloads-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(payloads.Name()) }()
	defer func() { _ = payloads.Close() }()
	rows, err := to.Write(trainstate.LedgerRows, func(w io.Writer) error {
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			for _, payload := range m.GetPayloads() {
				if _, err := payloads.Write(payload); err != nil {
					return err
				}
			}
			m.Payloads = nil
			if first == nil {
				first = m
				if at := m.GetLedger().GetState().GetStep(); at != s.GetStep() {
					return ErrConflict.WithMessage("the ledger of %s is at step %d, and the cut is at step %d", s.GetRunId(), at, s.GetStep()).Fix("take the snapshot again")
				}
			}
			if _, err := protodelim.MarshalTo(w, m); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	if _, err := payloads.Seek(0, io.SeekStart); err != nil {
		return err
	}
	stored, err := to.Write(trainstate.LedgerPayloads, func(w io.Writer) error {
		_, err := io.Copy(w, payloads)
		return err
	})
	if err != nil {
		return err
	}
	s.FirstUnconsumed = first.GetLedger().GetFirstUnconsumed()
	s.SampledBy = append([]string{s.GetRunId()}, first.GetLedger().GetConfig().GetSeed().GetRunIds()...)
	s.Files = append(s.Files, rows, stored)
	return nil
}

// Check implements Handler.
func (b bufferKind) Check(s *Snapshot, bad *rpcerr.Error) *rpcerr.Error {
	for _, path := range []string{trainstate.LedgerRows, trainstate.LedgerPayloads} {
		if !trainstate.Has(s, path) {
			bad = bad.Field("snapshot.files", "must have the file "+path)
		}
	}
	return b.trainState.Check(trainstate.State(s), bad)
}

// Verify implements Handler: each row has its payload.
func (b bufferKind) Verify(ctx context.Context, s *Snapshot, from Files) (flaws []*Flaw, err error) {
	rows, err := from.Open(ctx, trainstate.LedgerRows)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var end uint64
	in := &offsetReader{Reader: bufio.NewReader(rows)}
	for {
		at, m := in.offset, &bufferv1.CutLedgerResponse{}
		err := protodelim.UnmarshalOptions{MaxSize: 64 << 20}.UnmarshalFrom(in, m)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return append(flaws, &Flaw{Path: trainstate.LedgerRows, Offset: at, Message: "a row cannot be read: " + err.Error()}), nil
		}
		for _, sample := range m.GetSamples() {
			if sample.GetRef().GetOffset() != end {
				flaws = append(flaws, &Flaw{Path: trainstate.LedgerRows, Offset: at, Message: fmt.Sprintf("a payload is at byte %d, expected byte %d", sample.GetRef().GetOffset(), end)})
			}
			end = sample.GetRef().GetOffset() + sample.GetRef().GetLength()
		}
	}
	for _, f := range trainstate.Only(s, trainstate.LedgerPayloads).GetFiles() {
		if f.GetBytes() != end {
			flaws = append(flaws, &Flaw{Path: f.GetPath(), Offset: min(end, f.GetBytes()), Message: fmt.Sprintf("the rows name %d bytes of payloads, and the file has %d", end, f.GetBytes())})
		}
	}
	return flaws, nil
}

// offsetReader counts the bytes that were read.
type offsetReader struct {
	*bufio.Reader
	offset uint64
}

func (r *offsetReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.offset += uint64(n)
	return n, err
}

func (r *offsetReader) ReadByte() (byte, error) {
	b, err := r.Reader.ReadByte()
	if err == nil {
		r.offset++
	}
	return b, err
}
