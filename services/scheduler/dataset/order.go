// Package dataset turns a JSON Lines file, a seed and a position into the row that a prompt group is made of.
//
// Everything here is a function of file and seed alone; docs/wire.md fixes the arithmetic and testdata/ holds golden vectors.
package dataset

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/zeebo/blake3"
)

// Place is where a position falls: position = Epoch * rows + Index.
type Place struct {
	Epoch uint32
	Index uint64
}

// PlaceOf finds the place of a position in a dataset of so many rows (at least one).
func PlaceOf(position, rows uint64) Place {
	return Place{Epoch: uint32(position / rows), Index: position % rows}
}

// Order is the sequence in which the epochs visit the rows. It remembers the epoch asked for last (4 bytes a row); one
// goroutine at a time.
type Order struct {
	Seed    uint64
	Rows    uint64
	Shuffle bool

	epoch uint32
	rows  []uint32
}

// Row is the row, from 0, that stands at a place.
func (o *Order) Row(p Place) uint64 {
	if !o.Shuffle {
		return p.Index
	}
	if o.rows == nil || o.epoch != p.Epoch {
		o.rows, o.epoch = shuffled(o.Seed, p.Epoch, o.Rows), p.Epoch
	}
	return uint64(o.rows[p.Index])
}

// shuffled is Fisher-Yates from the top, driven by PCG seeded with (seed, epoch); rand.Shuffle is exactly that.
func shuffled(seed uint64, epoch uint32, n uint64) []uint32 {
	rows := make([]uint32, n)
	for i := range rows {
		rows[i] = uint32(i)
	}
	rand.New(rand.NewPCG(seed, uint64(epoch))).Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	return rows
}

// Seeds are the seeds of a group's samples. They do not depend on the attempt: a redispatch gives the same bits.
func Seeds(seed uint64, p Place, n int) []uint64 {
	const domain = "rollout.seed.v1"
	b := make([]byte, 0, len(domain)+32)
	b = append(b, domain...)
	b = binary.LittleEndian.AppendUint64(b, seed)
	b = binary.LittleEndian.AppendUint64(b, uint64(p.Epoch))
	b = binary.LittleEndian.AppendUint64(b, p.Index)
	out := make([]uint64, n)
	for sample := range out {
		sum := blake3.Sum256(binary.LittleEndian.AppendUint64(b, uint64(sample)))
		out[sample] = binary.LittleEndian.Uint64(sum[:8]) &^ (1 << 63)
	}
	return out
}
