package audit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/spill"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
)

// Rows are the steps, groups and samples of a ledger. They are in temporary files, sorted, so that
// memory does not depend on their number.
type Rows struct {
	folder         string // of the files
	steps, prompts *spill.Sorter
}

// Prompt is what a ledger has of a position.
type Prompt struct {
	Position uint64
	Groups   []*bufferv1.GroupRecord  // one; several, or none, if the ledger is damaged
	Samples  []*bufferv1.SampleRecord // in the order of the batch
}

// group returns the first record of the group, or nil.
func (p *Prompt) group() *bufferv1.GroupRecord {
	if len(p.Groups) == 0 {
		return nil
	}
	return p.Groups[0]
}

// NewRows returns no rows. Their files will be in folder; "": os.TempDir.
func NewRows(folder string) *Rows { return &Rows{folder, spill.New(folder), spill.New(folder)} }

// Close deletes the rows.
func (r *Rows) Close() error { return errors.Join(r.steps.Close(), r.prompts.Close()) }

// Kinds of records of a prompt, in their order.
const (
	groupRow byte = iota
	sampleRow
)

// add adds the rows of a ledger whose dataset has a number of rows.
func (r *Rows) add(rows uint64, m *bufferv1.ExportLedgerResponse) error {
	var key, value []byte
	put := func(to *spill.Sorter, m proto.Message) (err error) {
		if value, err = (proto.MarshalOptions{}).MarshalAppend(value[:0], m); err != nil {
			return fmt.Errorf("store rows of the ledger: %w", err)
		}
		return to.Add(key, value)
	}
	for _, s := range m.GetSteps() {
		key = binary.BigEndian.AppendUint64(key[:0], s.GetStep())
		if err := put(r.steps, s); err != nil {
			return err
		}
	}
	position := func(s *bufferv1.SampleRecord) uint64 {
		return uint64(s.GetRef().GetKey().GetEpoch())*rows + s.GetRef().GetKey().GetIndex()
	}
	sample := func(s *bufferv1.SampleRecord) error {
		key = append(binary.BigEndian.AppendUint64(key[:0], position(s)), sampleRow)
		key = binary.BigEndian.AppendUint32(key, s.GetRef().GetKey().GetSample())
		key = binary.BigEndian.AppendUint32(key, s.GetRef().GetKey().GetPart())
		return put(r.prompts, s)
	}
	samples := m.GetSamples()
	for _, g := range m.GetGroups() { // in the order of positions, so that less is merged
		for ; len(samples) > 0 && position(samples[0]) < g.GetPosition(); samples = samples[1:] {
			if err := sample(samples[0]); err != nil {
				return err
			}
		}
		key = append(binary.BigEndian.AppendUint64(key[:0], g.GetPosition()), groupRow)
		if err := put(r.prompts, g); err != nil {
			return err
		}
	}
	for _, s := range samples {
		if err := sample(s); err != nil {
			return err
		}
	}
	return nil
}

// Steps calls visit with each step, by number.
func (r *Rows) Steps(visit func(*bufferv1.StepRecord) error) error {
	return each(r.steps, func(_, value []byte) error {
		s := &bufferv1.StepRecord{}
		if err := proto.Unmarshal(value, s); err != nil {
			return err
		}
		return visit(s)
	})
}

// Prompts calls visit with each position that has rows, in order.
func (r *Rows) Prompts(visit func(*Prompt) error) error {
	var p *Prompt
	err := each(r.prompts, func(key, value []byte) error {
		position := binary.BigEndian.Uint64(key)
		if p != nil && p.Position != position {
			if err := visit(p); err != nil {
				return err
			}
			p = nil
		}
		if p == nil {
			p = &Prompt{Position: position}
		}
		if key[8] == groupRow {
			g := &bufferv1.GroupRecord{}
			p.Groups = append(p.Groups, g)
			return proto.Unmarshal(value, g)
		}
		s := &bufferv1.SampleRecord{}
		p.Samples = append(p.Samples, s)
		return proto.Unmarshal(value, s)
	})
	if err != nil || p == nil {
		return err
	}
	return visit(p)
}

// each calls visit with the records of a sorter.
func each(from *spill.Sorter, visit func(key, value []byte) error) error {
	records, err := from.Read()
	if err != nil {
		return err
	}
	for {
		key, value, err := records.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := visit(key, value); err != nil {
			return err
		}
	}
}
