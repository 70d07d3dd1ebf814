package segment

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// Report is what Scan found in a file.
type Report struct {
	Missing bool   // the file does not exist
	Bytes   uint64 // size of the file
	Flaw    string // the first problem; "": every record is intact
	Offset  uint64 // of the problem
}

// Scan reads and verifies the records within the durable bytes of a segment. Bytes after those are
// not a flaw. It returns an error if the file cannot be read.
func Scan(dir string, number uint32, durable uint64) (Report, error) {
	f, err := os.Open(Path(dir, number))
	if errors.Is(err, os.ErrNotExist) {
		return Report{Missing: true}, nil
	}
	if err != nil {
		return Report{}, fmt.Errorf("scan segment %d: %w", number, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return Report{}, fmt.Errorf("scan segment %d: %w", number, err)
	}
	r := Report{Bytes: uint64(info.Size())}
	if r.Bytes < durable {
		r.Flaw, r.Offset = fmt.Sprintf("it lacks %d bytes that were durable", durable-r.Bytes), r.Bytes
	}
	if flaw, at := walk(bufio.NewReaderSize(f, 1<<20), min(durable, r.Bytes)); flaw != "" {
		r.Flaw, r.Offset = flaw, at // it comes before the end of the file
	}
	return r, nil
}

// walk verifies the magic and the records in the first end bytes. flaw is "" if they are intact.
func walk(in io.Reader, end uint64) (flaw string, at uint64) {
	header := make([]byte, HeaderBytes)
	if end < uint64(len(magic)) {
		return "", 0 // the caller has reported a file this short
	}
	if _, err := io.ReadFull(in, header[:len(magic)]); err != nil || string(header[:len(magic)]) != magic {
		return fmt.Sprintf("it does not begin with %q", magic), 0
	}
	var payload []byte
	for at = uint64(len(magic)); at < end; {
		if end-at < HeaderBytes {
			return "a record's header is cut off", at
		}
		if _, err := io.ReadFull(in, header); err != nil {
			return err.Error(), at
		}
		length := uint64(binary.LittleEndian.Uint32(header))
		if length > end-at-HeaderBytes {
			return fmt.Sprintf("a record of %d bytes runs past the end", length), at
		}
		if uint64(cap(payload)) < length {
			payload = make([]byte, length)
		}
		payload = payload[:length]
		if _, err := io.ReadFull(in, payload); err != nil {
			return err.Error(), at
		}
		if CRC(payload) != binary.LittleEndian.Uint32(header[4:]) {
			return "a record has a wrong checksum", at
		}
		at += HeaderBytes + length
	}
	return "", at
}
