// Package dataset maps a JSON Lines file, a seed, and a position to the row of a prompt group.
//
// All results depend on the file and the seed alone. docs/wire.md defines the arithmetic, and
// testdata/ has golden vectors.
package dataset

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/zeebo/blake3"
)

// Place is the epoch and index of a position: position = Epoch * rows + Index.
type Place struct {
	Epoch uint32
	Index uint64
}

// PlaceOf returns the place of a position in a dataset with this many rows (at least one).
func PlaceOf(position, rows uint64) Place {
	return Place{Epoch: uint32(position / rows), Index: position % rows}
}

// Order is the sequence in which the epochs visit the rows. It caches the last epoch (4 bytes per
// row). Not safe for concurrent use.
type Order struct {
	Seed    uint64
	Rows    uint64
	Shuffle bool

	epoch uint32
	rows  []uint32
}

// Row is the row at a place, counted from 0.
func (o *Order) Row(p Place) uint64 {
	if !o.Shuffle {
		return p.Index
	}
	if o.rows == nil || o.epoch != p.Epoch {
		o.rows, o.epoch = shuffled(o.Seed, p.Epoch, o.Rows), p.Epoch
	}
	return uint64(o.rows[p.Index])
}

// shuffled is Fisher-Yates from the top with a PCG seeded with (seed, epoch), as rand.Shuffle
// implements it.
func shuffled(seed uint64, epoch uint32, n uint64) []uint32 {
	rows := make([]uint32, n)
	for i := range rows {
		rows[i] = uint32(i)
	}
	rand.New(rand.NewPCG(seed, uint64(epoch))).Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	return rows
}

// Seeds are the seeds of a group's samples. They do not depend on the attempt, so a new attempt
// gives the same bits.
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
