package blob

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
)

// BlockBytes is the size of the blocks of an artifact that have checksums.
const BlockBytes = 1 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Blocks returns the CRC-32C of each block, little-endian, 4 bytes each. The last block may be
// shorter than BlockBytes.
func Blocks(r io.Reader) ([]byte, error) {
	var out []byte
	buffer := make([]byte, BlockBytes)
	for {
		n, err := io.ReadFull(r, buffer)
		if n > 0 {
			out = binary.LittleEndian.AppendUint32(out, crc32.Checksum(buffer[:n], castagnoli))
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// DamagedBlocks returns the numbers of the blocks, from 0, in which the checksums differ.
func DamagedBlocks(want, found []byte) (numbers []int) {
	for at := 0; at+4 <= len(want); at += 4 {
		if at+4 > len(found) || string(want[at:at+4]) != string(found[at:at+4]) {
			numbers = append(numbers, at/4)
		}
	}
	return numbers
}
