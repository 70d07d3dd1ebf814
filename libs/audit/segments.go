package audit

import (
	"bytes"
	"encoding/binary"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/spill"
)

// segmentCheck checks payload files, and where payloads are in them.
type segmentCheck struct {
	*index
	*findings
}

// places collects where the payloads of samples are in segments.
type places struct {
	sorter     *spill.Sorter
	key, value []byte
}

// add adds the samples of a prompt. Artifacts are content-addressed: equal samples share one.
func (a *places) add(p *Prompt) error {
	for _, s := range p.Samples {
		if s.GetSegment() == 0 {
			continue
		}
		k := s.GetRef().GetKey()
		a.key = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(a.key[:0], s.GetSegment()), s.GetRef().GetOffset())
		a.value = binary.BigEndian.AppendUint64(a.value[:0], p.Position)
		a.value = binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(a.value, k.GetSample()), k.GetAttempt())
		a.value = binary.BigEndian.AppendUint64(a.value, p.group().GetStep())
		if err := a.sorter.Add(a.key, a.value); err != nil {
			return err
		}
	}
	return nil
}

// shared finds payloads of two samples.
func (c segmentCheck) shared(all *places) error {
	var lastKey, last []byte
	return each(all.sorter, func(key, value []byte) error {
		if bytes.Equal(key, lastKey) {
			position, sample, attempt := binary.BigEndian.Uint64(value), binary.BigEndian.Uint32(value[8:]), binary.BigEndian.Uint32(value[12:])
			at := Break{
				Group: c.name(position), Step: binary.BigEndian.Uint64(value[16:]), Attempt: &attempt, Sample: &sample,
				Segment: binary.BigEndian.Uint32(key), Offset: proto.Uint64(binary.BigEndian.Uint64(key[4:])),
			}
			c.add(at, "PAYLOAD_SHARED", "its payload is also that of sample %d of group %s: one sample is counted twice",
				binary.BigEndian.Uint32(last[8:]), c.name(binary.BigEndian.Uint64(last)))
		}
		lastKey, last = append(lastKey[:0], key...), append(last[:0], value...)
		return nil
	})
}

// files checks that payload files are whole.
func (c segmentCheck) files() {
	for _, f := range c.Segments {
		at := Break{Segment: f.GetNumber(), Offset: proto.Uint64(f.GetFlawOffset())}
		switch {
		case f.GetTrimmed():
			c.report.Segments.Covered++
		case f.GetMissing():
			c.add(Break{Segment: f.GetNumber()}, "SEGMENT_MISSING", "segment %d does not exist; the ledger refers to %d bytes of it", f.GetNumber(), f.GetBytes())
		case f.GetFileBytes() < f.GetBytes():
			c.add(at, "SEGMENT_SHORT", "segment %d has %d bytes; %d were durable: %s", f.GetNumber(), f.GetFileBytes(), f.GetBytes(), f.GetFlaw())
		case f.GetFlaw() != "":
			c.add(at, "SEGMENT_DAMAGED", "segment %d: %s", f.GetNumber(), f.GetFlaw())
		default:
			c.report.Segments.Whole++
			c.report.Segments.Bytes += f.GetBytes()
		}
	}
}
