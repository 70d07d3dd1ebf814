// Package blobtest is the suite that every blob.Store passes.
package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/rollout-rl/rollout/libs/blob"
)

// Run checks the stores that open makes. Each call gives an empty one.
func Run(t *testing.T, open func(t *testing.T) blob.Store) {
	for name, test := range map[string]func(*testing.T, blob.Store){
		"PutThenGet":             putThenGet,
		"Ranges":                 ranges,
		"Missing":                missing,
		"KeyIsWrittenOnce":       writtenOnce,
		"OneOfManyWritersWins":   oneWins,
		"FailedPutLeavesNothing": failedPut,
		"List":                   list,
		"BadKeys":                badKeys,
		"PutFile":                putFile,
		"ContentAddressing":      contentAddressing,
		"LargeInParts":           large,
		"OneLargeWriterWins":     oneLargeWins,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

func read(t *testing.T, s blob.Store, key string, r blob.Range) string {
	t.Helper()
	rc, err := s.Get(t.Context(), key, r)
	if err != nil {
		t.Fatalf("get %s %+v: %v", key, r, err)
	}
	defer rc.Close()
	b, err := io.ReadAll(rc)
	if err != nil {
		t.Fatalf("read %s: %v", key, err)
	}
	return string(b)
}

func put(t *testing.T, s blob.Store, key, data string) {
	t.Helper()
	if _, err := s.Put(t.Context(), key, strings.NewReader(data)); err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
}

func putThenGet(t *testing.T, s blob.Store) {
	for _, data := range []string{"", "hello", strings.Repeat("x", 3<<20)} {
		key := fmt.Sprintf("a/b/%d", len(data))
		info, err := s.Put(t.Context(), key, strings.NewReader(data))
		if err != nil || info.Key != key || info.Size != int64(len(data)) || info.Modified.IsZero() {
			t.Fatalf("put: %+v %v", info, err)
		}
		if got := read(t, s, key, blob.Range{}); got != data {
			t.Errorf("%d bytes came back of %d", len(got), len(data))
		}
		if stat, err := s.Stat(t.Context(), key); err != nil || stat != info {
			t.Errorf("stat %+v %v, put said %+v", stat, err, info)
		}
	}
}

func ranges(t *testing.T, s blob.Store) {
	put(t, s, "k", "0123456789")
	for _, c := range []struct {
		r    blob.Range
		want string
	}{
		{blob.Range{}, "0123456789"},
		{blob.Range{Offset: 3}, "3456789"},
		{blob.Range{Length: 2}, "01"},
		{blob.Range{Offset: 4, Length: 3}, "456"},
		{blob.Range{Offset: 8, Length: 100}, "89"},
		{blob.Range{Offset: 10}, ""},
	} {
		if got := read(t, s, "k", c.r); got != c.want {
			t.Errorf("%+v: %q, want %q", c.r, got, c.want)
		}
	}
	for _, r := range []blob.Range{{Offset: 11}, {Offset: -1}, {Length: -1}} {
		if _, err := s.Get(t.Context(), "k", r); !errors.Is(err, blob.ErrBadRange) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

func missing(t *testing.T, s blob.Store) {
	put(t, s, "folder/k", "x")
	for _, key := range []string{"nothing", "folder"} {
		if _, err := s.Get(t.Context(), key, blob.Range{}); !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("get %s: %v", key, err)
		}
		if _, err := s.Stat(t.Context(), key); !errors.Is(err, blob.ErrNotFound) {
			t.Errorf("stat %s: %v", key, err)
		}
	}
	if err := s.Delete(t.Context(), "nothing"); err != nil {
		t.Errorf("delete of nothing: %v", err)
	}
	if err := s.Delete(t.Context(), "folder/k"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Stat(t.Context(), "folder/k"); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("after delete: %v", err)
	}
}

func writtenOnce(t *testing.T, s blob.Store) {
	put(t, s, "k", "first")
	if _, err := s.Put(t.Context(), "k", strings.NewReader("second")); !errors.Is(err, blob.ErrExists) {
		t.Errorf("second put: %v", err)
	}
	if got := read(t, s, "k", blob.Range{}); got != "first" {
		t.Errorf("the blob changed to %q", got)
	}
}

func oneWins(t *testing.T, s blob.Store) {
	const n = 8
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() {
			_, errs[i] = s.Put(t.Context(), "contested", strings.NewReader(strings.Repeat(fmt.Sprint(i), 1<<16)))
		})
	}
	wg.Wait()
	winner := -1
	for i, err := range errs {
		switch {
		case err == nil && winner < 0:
			winner = i
		case err == nil:
			t.Errorf("both %d and %d won", winner, i)
		case !errors.Is(err, blob.ErrExists):
			t.Errorf("writer %d: %v", i, err)
		}
	}
	if got := read(t, s, "contested", blob.Range{}); got != strings.Repeat(fmt.Sprint(winner), 1<<16) {
		t.Errorf("the content is not the winner's")
	}
}

func failedPut(t *testing.T, s blob.Store) {
	boom := errors.New("boom")
	_, err := s.Put(t.Context(), "k", io.MultiReader(strings.NewReader("half"), iotest.ErrReader(boom)))
	if !errors.Is(err, boom) {
		t.Errorf("put: %v", err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Put(canceled, "k", strings.NewReader("x")); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled put: %v", err)
	}
	for info, err := range s.List(t.Context(), "") {
		t.Errorf("left: %+v %v", info, err)
	}
}

func list(t *testing.T, s blob.Store) {
	for _, key := range []string{"b", "a/2", "a/1", "ab", "a/c/3"} {
		put(t, s, key, key)
	}
	for prefix, want := range map[string][]string{
		"":     {"a/1", "a/2", "a/c/3", "ab", "b"},
		"a":    {"a/1", "a/2", "a/c/3", "ab"},
		"a/":   {"a/1", "a/2", "a/c/3"},
		"a/c":  {"a/c/3"},
		"none": nil,
		"no/e": nil,
	} {
		var got []string
		for info, err := range s.List(t.Context(), prefix) {
			if err != nil {
				t.Fatal(err)
			}
			if info.Size != int64(len(info.Key)) {
				t.Errorf("size of %s: %d", info.Key, info.Size)
			}
			got = append(got, info.Key)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", prefix, got, want)
		}
	}
	for _, err := range s.List(t.Context(), "") { // stopping early is fine
		if err != nil {
			t.Error(err)
		}
		break
	}
}

func badKeys(t *testing.T, s blob.Store) {
	for _, key := range []string{"", "/", "/a", "a/", "a//b", "../x", "a/../../x", ".hidden", "a/.tmp/b", "a\x00b", `a\b`} {
		if _, err := s.Put(t.Context(), key, strings.NewReader("x")); !errors.Is(err, blob.ErrBadKey) {
			t.Errorf("put %q: %v", key, err)
		}
		if _, err := s.Get(t.Context(), key, blob.Range{}); !errors.Is(err, blob.ErrBadKey) {
			t.Errorf("get %q: %v", key, err)
		}
	}
}

func putFile(t *testing.T, s blob.Store) {
	fp, ok := s.(blob.FilePutter)
	if !ok {
		return // the port is optional
	}
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("from a file"), 0o600); err != nil {
		t.Fatal(err)
	}
	if info, err := fp.PutFile(t.Context(), "dir/f", path); err != nil || info.Size != 11 {
		t.Fatalf("%+v %v", info, err)
	}
	if _, err := fp.PutFile(t.Context(), "dir/f", path); !errors.Is(err, blob.ErrExists) {
		t.Errorf("again: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if got := read(t, s, "dir/f", blob.Range{}); got != "from a file" {
		t.Errorf("got %q", got)
	}
	if _, err := fp.PutFile(t.Context(), "dir/g", path); err == nil || errors.Is(err, blob.ErrNotFound) {
		t.Errorf("a missing source: %v", err)
	}
}

func contentAddressing(t *testing.T, s blob.Store) {
	cas := blob.NewCAS(s, t.TempDir())
	data := bytes.Repeat([]byte("weights"), 1000)
	first, err := cas.PutBytes(t.Context(), data)
	if err != nil {
		t.Fatal(err)
	}
	second, size, err := cas.Put(t.Context(), bytes.NewReader(data))
	if err != nil || second != first || size != int64(len(data)) {
		t.Fatalf("%s then %s, %d bytes: %v", first, second, size, err)
	}
	if got, err := cas.Read(t.Context(), first); err != nil || !bytes.Equal(got, data) {
		t.Errorf("read %d bytes: %v", len(got), err)
	}
	if info, err := cas.Stat(t.Context(), first); err != nil || info.Key != first || info.Size != size {
		t.Errorf("stat %+v %v", info, err)
	}
	if _, err := cas.Read(t.Context(), "blake3-../../etc/passwd"); !errors.Is(err, blob.ErrBadID) {
		t.Errorf("bad id: %v", err)
	}
	flipByte(t, s, cas, first, data)
	if err := cas.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	if _, err := cas.Read(t.Context(), first); !errors.Is(err, blob.ErrNotFound) {
		t.Errorf("after delete: %v", err)
	}
}

// flipByte changes a stored byte without using the CAS, and checks that a read detects it.
func flipByte(t *testing.T, s blob.Store, cas *blob.CAS, content string, data []byte) {
	t.Helper()
	key, err := cas.Key(content)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	bad := bytes.Clone(data)
	bad[17] ^= 1
	put(t, s, key, string(bad))
	if _, err := cas.Read(t.Context(), content); !errors.Is(err, blob.ErrCorrupt) {
		t.Errorf("a flipped byte: %v", err)
	}
}
