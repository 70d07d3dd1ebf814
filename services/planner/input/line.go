package input

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"unicode/utf8"
)

func readLine(reader *bufio.Reader, line []byte, w io.Writer) ([]byte, error) {
	for {
		piece, err := reader.ReadSlice('\n')
		line = append(line, piece...)
		_, _ = w.Write(piece)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// Lines returns the given lines of a file, from 1 and ascending, truncated to the length of an
// excerpt.
func Lines(file string, wanted []uint64) map[uint64]string {
	out := map[uint64]string{}
	f, err := os.Open(file)
	if err != nil {
		return out // the problem is reported without an excerpt
	}
	defer f.Close()
	reader := bufio.NewReaderSize(f, 1<<20)
	var line []byte
	for n := uint64(1); len(wanted) > 0; n++ {
		line, err = readLine(reader, line[:0], io.Discard)
		if n == wanted[0] {
			text := bytes.TrimRight(line, "\r\n")
			out[n], wanted = strings.ToValidUTF8(string(text[:min(len(text), maxExcerpt)]), "\uFFFD"), wanted[1:]
		}
		if err != nil {
			break
		}
	}
	return out
}

// wordAt is the JSON string or character at a byte.
func wordAt(line []byte, at int) string {
	rest := line[at:]
	if len(rest) > 0 && rest[0] == '"' {
		if end := bytes.IndexByte(rest[1:], '"'); end >= 0 {
			return string(rest[:end+2])
		}
	}
	_, size := utf8.DecodeRune(rest)
	return string(rest[:size])
}

func invalidUTF8(line []byte) int {
	for i := 0; i < len(line); {
		r, size := utf8.DecodeRune(line[i:])
		if r == utf8.RuneError && size == 1 {
			return i
		}
		i += size
	}
	return 0
}

// byteOrderMark is the prefix that some editors on Windows write.
const byteOrderMark = "\xef\xbb\xbf"

// utf16 is the name in iconv of the encoding of a first line in UTF-16; "" for another encoding.
func utf16(line []byte) string {
	return map[string]string{"\xff\xfe": "UTF-16", "\xfe\xff": "UTF-16", "{\x00": "UTF-16LE", "\x00{": "UTF-16BE"}[string(line[:min(len(line), 2)])]
}
