package input

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
)

// Drop copies a JSON Lines file without some rows, which count from 0 and ascend.
func Drop(file, output string, rows []uint64) error {
	in, err := os.Open(file)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(output)
	if err != nil {
		return err
	}
	reader, writer := bufio.NewReaderSize(in, 1<<20), bufio.NewWriterSize(out, 1<<20)
	err = drop(reader, writer, rows)
	if err := errors.Join(err, writer.Flush(), out.Close()); err != nil {
		return fmt.Errorf("copy %s without %d rows: %w", file, len(rows), err)
	}
	return nil
}

func drop(reader *bufio.Reader, writer io.Writer, rows []uint64) error {
	var line []byte
	for row := uint64(0); ; {
		var err error
		line, err = readLine(reader, line[:0], io.Discard)
		if text := bytes.TrimSpace(line); len(text) > 0 {
			if len(rows) > 0 && rows[0] == row {
				rows = rows[1:]
			} else if _, err := writer.Write(append(text, '\n')); err != nil {
				return err
			}
			row++
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
