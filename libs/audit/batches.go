package audit

import (
	"encoding/binary"
	"errors"
	"io"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/libs/spill"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// batches collects the groups and samples of each step, in the order of its batch. Groups are in
// the order of positions, which in an asynchronous run is not that of steps.
type batches struct {
	sorter *spill.Sorter
	key    []byte
	value  []byte
}

// batch is what groups and samples make of a step.
type batch struct {
	taken, skipped, zero, samples uint32
	id                            string
}

// Kinds of records of a batch that are not samples.
const (
	takenRow byte = iota
	skippedRow
	zeroRow // skipped because its rewards are equal
)

// add adds the groups of a prompt that a step took or skipped, with their samples.
func (b *batches) add(p *Prompt) error {
	for at, g := range p.Groups {
		kind := takenRow
		switch {
		case g.GetState() == consumed, g.GetState() == leased:
		case g.GetState() == excluded && g.GetReason() == zeroAdvantage:
			kind = zeroRow
		case g.GetState() == excluded:
			kind = skippedRow
		default:
			continue
		}
		b.key = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(b.key[:0], g.GetStep()), p.Position)
		b.key = binary.BigEndian.AppendUint32(b.key, uint32(at))
		if err := b.sorter.Add(b.key, []byte{kind}); err != nil {
			return err
		}
		if kind != takenRow {
			continue
		}
		for _, s := range p.Samples { // after the group, because the sorter keeps the order of equal keys
			b.value = appendSample(b.value[:0], s)
			if err := b.sorter.Add(b.key, b.value); err != nil {
				return err
			}
		}
	}
	return nil
}

// read begins to read the batches.
func (b *batches) read() (*batchReader, error) {
	records, err := b.sorter.Read()
	if err != nil {
		return nil, err
	}
	r := &batchReader{records: records}
	return r, r.advance()
}

// batchReader reads batches in the order of steps.
type batchReader struct {
	records *spill.Reader
	step    uint64 // of the next record
	value   []byte // the next record
	ended   bool
	last    uint64 // step that was read last
	batch   batch  // of that step
}

func (r *batchReader) advance() error {
	key, value, err := r.records.Next()
	if errors.Is(err, io.EOF) {
		r.ended = true
		return nil
	}
	if err != nil {
		return err
	}
	r.step, r.value = binary.BigEndian.Uint64(key), value
	return nil
}

// of returns the batch of a step. Steps are asked for in order.
func (r *batchReader) of(step uint64) (batch, error) {
	if r.batch.id != "" && r.last == step { // a step that is recorded twice
		return r.batch, nil
	}
	var b batch
	h := newBatchHash()
	for !r.ended && r.step <= step {
		if r.step == step {
			b.add(h, r.value)
		}
		if err := r.advance(); err != nil {
			return batch{}, err
		}
	}
	b.id = h.ID()
	r.last, r.batch = step, b
	return b, nil
}

func (b *batch) add(h *id.Hasher, value []byte) {
	if len(value) > 1 {
		b.samples++
		_, _ = h.Write(value) // a hasher never fails
		return
	}
	switch value[0] {
	case takenRow:
		b.taken++
	case zeroRow:
		b.zero++
		b.skipped++
	case skippedRow:
		b.skipped++
	}
}

// A batch id is blake3 over "rollout.batch.v1" and, for each sample, epoch, index, attempt, sample,
// part and CRC-32C as 8-byte little-endian integers.
func newBatchHash() *id.Hasher {
	h := id.NewHasher()
	_, _ = h.Write([]byte("rollout.batch.v1")) // a hasher never fails
	return h
}

func appendSample(to []byte, s *bufferv1.SampleRecord) []byte {
	k := s.GetRef().GetKey()
	for _, n := range [6]uint64{uint64(k.GetEpoch()), k.GetIndex(), uint64(k.GetAttempt()), uint64(k.GetSample()), uint64(k.GetPart()), uint64(s.GetRef().GetCrc32C())} {
		to = binary.LittleEndian.AppendUint64(to, n)
	}
	return to
}
