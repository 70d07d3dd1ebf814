package storage

import (
	"bytes"
	"cmp"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

// Telemetry reports whether the metrics of an event kind are numbers that a worker reports every
// second. They are not stored as events.
func Telemetry(kind string) bool { return kind == "sampling" }

// Tier is a resolution at which telemetry is stored.
//
//	reports --Grace--> 1 s --Recent--> 10 s --Fine--> 5 minutes, as long as the run
type Tier struct {
	Seconds int64         // of a bucket
	Chunk   int64         // seconds of a row
	After   time.Duration // age at which a row of the tier before moves to this one
}

// Grace is the time that reports may take from a worker to the store.
const Grace = time.Minute

// Tiers are the resolutions at which reports are stored, after the reports themselves. recent is
// how long each second is kept, fine how long ten seconds are.
func Tiers(recent, fine time.Duration) []Tier {
	return []Tier{{1, 60, Grace}, {10, 1800, recent}, {300, 6 * 3600, fine}}
}

// Bucket summarizes the values of some time. Values are stored with the precision of a float32.
type Bucket struct {
	Start          int64 // seconds since 1970
	Seconds        int64
	Count          uint64
	Min, Mean, Max float64
}

// Readings are the values of a source by time: those of a name are in Values[i].
type Readings struct {
	Values [][]Bucket // by name, ordered by time
}

// TelemetrySeries is one metric of a worker.
type TelemetrySeries struct {
	Service, Name string
	Buckets       []Bucket
}

// TelemetryFilter selects telemetry of a run.
type TelemetryFilter struct {
	Run      string
	Services []string // empty: all
	Names    []string // empty: all
	Since    time.Time
	Until    time.Time // zero: no end
	Seconds  int64     // smallest bucket; 0: as stored
}

// Report is the readings of a single report, of values in the order of names. A value that is not a
// number is left out.
func Report(at time.Time, values []float64) Readings {
	r := Readings{Values: make([][]Bucket, len(values))}
	for i, v := range values {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			r.Values[i] = []Bucket{{at.Unix(), 1, 1, v, v, v}}
		}
	}
	return r
}

// Coarser joins buckets into buckets of at least a number of seconds.
func Coarser(buckets []Bucket, seconds int64) []Bucket {
	var out []Bucket
	for _, b := range buckets {
		b.Seconds = max(b.Seconds, seconds)
		b.Start -= b.Start % b.Seconds
		if n := len(out); n > 0 && out[n-1].Start == b.Start && out[n-1].Seconds == b.Seconds {
			out[n-1] = out[n-1].join(b)
			continue
		}
		out = append(out, b)
	}
	return out
}

func (b Bucket) join(o Bucket) Bucket {
	all := b.Count + o.Count
	b.Mean += (o.Mean - b.Mean) * float64(o.Count) / float64(all)
	b.Min, b.Max, b.Count = min(b.Min, o.Min), max(b.Max, o.Max), all
	return b
}

// Join joins the readings of a source into buckets of a number of seconds.
func Join(parts []Readings, names int, seconds int64) Readings {
	out := Readings{Values: make([][]Bucket, names)}
	for i := range out.Values {
		var all []Bucket
		for _, part := range parts {
			all = append(all, part.Values[i]...)
		}
		slices.SortStableFunc(all, func(a, b Bucket) int { return cmp.Compare(a.Start, b.Start) })
		out.Values[i] = Coarser(all, seconds)
	}
	return out
}

// Encode returns the bytes of a row whose buckets begin at start and have equal lengths. They are
// compressed with DEFLATE (RFC 1951), and have for each name: the number of buckets (uvarint), for
// each the distance to the one before in buckets (uvarint), for each the count (uvarint), and as
// little-endian float32 the means, then minimum and maximum of those with a count above 1.
func (r Readings) Encode(start, seconds int64) []byte {
	var raw []byte
	number := func(v float64) { raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(float32(v))) }
	for _, buckets := range r.Values {
		raw = binary.AppendUvarint(raw, uint64(len(buckets)))
		last := start
		for _, b := range buckets {
			raw = binary.AppendUvarint(raw, uint64((b.Start-last)/seconds))
			last = b.Start
		}
		for _, b := range buckets {
			raw = binary.AppendUvarint(raw, b.Count)
		}
		for _, b := range buckets {
			number(b.Mean)
		}
		for _, b := range buckets {
			if b.Count > 1 {
				number(b.Min)
				number(b.Max)
			}
		}
	}
	var packed bytes.Buffer
	w, _ := flate.NewWriter(&packed, flate.DefaultCompression) // the level is valid
	_, _ = w.Write(raw)                                        // a buffer takes everything
	_ = w.Close()
	return packed.Bytes()
}

var errChunk = errors.New("the row of telemetry is damaged")

// Decode reads what Encode wrote, of a source with a number of names.
func Decode(packed []byte, names int, start, seconds int64) (Readings, error) {
	raw, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(packed)), 64<<20))
	if err != nil {
		return Readings{}, fmt.Errorf("%w: %w", errChunk, err)
	}
	d := decoder{raw: raw}
	out := Readings{Values: make([][]Bucket, names)}
	for i := range out.Values {
		n := d.integer()
		if n > uint64(len(raw)) {
			return Readings{}, errChunk
		}
		buckets := make([]Bucket, n)
		last := start
		for j := range buckets {
			last += int64(d.integer()) * seconds
			buckets[j].Start, buckets[j].Seconds = last, seconds
		}
		for j := range buckets {
			buckets[j].Count = d.integer()
		}
		for j := range buckets {
			buckets[j].Mean = d.number()
		}
		for j := range buckets {
			b := &buckets[j]
			if b.Min, b.Max = b.Mean, b.Mean; b.Count > 1 {
				b.Min, b.Max = d.number(), d.number()
			}
		}
		out.Values[i] = buckets
	}
	if d.short || len(d.raw) > 0 {
		return Readings{}, errChunk
	}
	return out, nil
}

type decoder struct {
	raw   []byte
	short bool
}

func (d *decoder) integer() uint64 {
	v, n := binary.Uvarint(d.raw)
	if n <= 0 {
		d.short = true
		return 0
	}
	d.raw = d.raw[n:]
	return v
}

func (d *decoder) number() float64 {
	if len(d.raw) < 4 {
		d.short = true
		return 0
	}
	v := math.Float32frombits(binary.LittleEndian.Uint32(d.raw))
	d.raw = d.raw[4:]
	return float64(v)
}
