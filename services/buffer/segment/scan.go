package segment

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// Report is what Scan found of a file.
type Report struct {
	Missing bool   // there is no file
	Bytes   uint64 // that it has
	Flaw    string // the first thing that is wrong; "" where every record is whole
	Offset  uint64 // of that
}

// Scan reads the records of a segment up to what is durable of it, and checks each. Bytes beyond are a torn tail and no flaw.
// The error is that of a file which can't be read at all.
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
		r.Flaw, r.Offset = fmt.Sprintf("it ends %d bytes short of what was durable", durable-r.Bytes), r.Bytes
	}
	if flaw, at := walk(bufio.NewReaderSize(f, 1<<20), min(durable, r.Bytes)); flaw != "" {
		r.Flaw, r.Offset = flaw, at // it comes before the end
	}
	return r, nil
}

// walk checks magic and records in the first end bytes; the flaw is "" where they are whole.
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
			return "a record has another checksum", at
		}
		at += HeaderBytes + length
	}
	return "", at
}
