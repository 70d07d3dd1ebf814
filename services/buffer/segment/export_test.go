package segment

import "encoding/binary"

// Share is what readers do with a file that they have opened.
var Share = share

// Bytes is a record of a payload.
func Bytes(payload string) []byte {
	out := binary.LittleEndian.AppendUint32(nil, uint32(len(payload)))
	out = binary.LittleEndian.AppendUint32(out, CRC([]byte(payload)))
	return append(out, payload...)
}
