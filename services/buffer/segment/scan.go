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
	if err := share(f); errors.Is(err, errTaken) || errors.Is(err, os.ErrNotExist) { // it was trimmed meanwhile
		return Report{Missing: true}, nil
	} else if err != nil {
		return Report{}, fmt.Errorf("scan segment %d: %w", number, err)
	}
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
	head := make([]byte, len(magic))
	if end < uint64(len(magic)) {
		return "", 0 // the caller has told of a file this short
	}
	if _, err := io.ReadFull(in, head); err != nil || string(head) != magic {
		return fmt.Sprintf("it does not begin with %q", magic), 0
	}
	return records(in, uint64(len(magic)), end, func(uint64, []byte, bool) bool { return true })
}

// records reads the records between two bytes of a file and gives each whole one to see, with where its payload begins and whether it is a
// note, until that returns false. payload is see's only while it runs. at is the end of the last whole record.
func records(in io.Reader, begin, end uint64, see func(offset uint64, payload []byte, note bool) bool) (flaw string, at uint64) {
	var payload []byte
	header := make([]byte, HeaderBytes)
	for at = begin; at < end; {
		if end-at < HeaderBytes {
			return "a record's header is cut off", at
		}
		if _, err := io.ReadFull(in, header); err != nil {
			return err.Error(), at
		}
		word := binary.LittleEndian.Uint32(header)
		length := uint64(word &^ noteBit)
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
		sum, isNote := CRC(payload), word&noteBit != 0
		if isNote {
			sum = ^sum
		}
		if sum != binary.LittleEndian.Uint32(header[4:]) {
			return "a record has another checksum", at
		}
		if !see(at+HeaderBytes, payload, isNote) {
			return "", at
		}
		at += HeaderBytes + length
	}
	return "", at
}
