package dataset_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/id"
	"github.com/rollout-rl/rollout/services/scheduler/dataset"
)

// golden.json was computed by another implementation of PCG-DXSM, Fisher-Yates and the seeds, in
// Python.
type golden struct {
	Orders []struct {
		Seed  string
		Epoch uint32
		Rows  []uint64
	}
	Seeds []struct {
		Seed    string
		Epoch   uint32
		Index   uint64
		Samples []string
	}
}

func load(t *testing.T) (g golden) {
	t.Helper()
	text, err := os.ReadFile("testdata/golden.json")
	if err == nil {
		err = json.Unmarshal(text, &g)
	}
	if err != nil || len(g.Orders) == 0 || len(g.Seeds) == 0 {
		t.Fatal("no golden vectors", err)
	}
	return g
}

func number(t *testing.T, text string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestOrderIsGolden(t *testing.T) {
	t.Parallel()
	for _, g := range load(t).Orders {
		o := dataset.Order{Seed: number(t, g.Seed), Rows: uint64(len(g.Rows)), Shuffle: true}
		for index, want := range g.Rows {
			if got := o.Row(dataset.Place{Epoch: g.Epoch, Index: uint64(index)}); got != want {
				t.Fatalf("seed %s epoch %d index %d: row %d, want %d", g.Seed, g.Epoch, index, got, want)
			}
		}
	}
}

func TestSeedsAreGolden(t *testing.T) {
	t.Parallel()
	for _, g := range load(t).Seeds {
		got := dataset.Seeds(number(t, g.Seed), dataset.Place{Epoch: g.Epoch, Index: g.Index}, len(g.Samples))
		for sample, want := range g.Samples {
			if got[sample] != number(t, want) {
				t.Fatalf("seed %s epoch %d index %d sample %d: %d, want %s", g.Seed, g.Epoch, g.Index, sample, got[sample], want)
			}
		}
	}
}

func TestEachEpochVisitsEachRowOnce(t *testing.T) {
	t.Parallel()
	const rows = 1000
	o := dataset.Order{Seed: 3, Rows: rows, Shuffle: true}
	var before []uint64
	for epoch := range uint64(3) {
		var visited []uint64
		for i := range uint64(rows) {
			visited = append(visited, o.Row(dataset.PlaceOf(epoch*rows+i, rows)))
		}
		if slices.Equal(visited, before) {
			t.Fatal("two epochs have one order")
		}
		before = slices.Clone(visited)
		slices.Sort(visited)
		if visited[0] != 0 || visited[rows-1] != rows-1 || len(slices.Compact(visited)) != rows {
			t.Fatal("a row is missing or twice there")
		}
	}
	plain := dataset.Order{Seed: 3, Rows: rows}
	if got := plain.Row(dataset.PlaceOf(2*rows+7, rows)); got != 7 {
		t.Fatalf("without shuffle: row %d", got)
	}
}

func write(t *testing.T, content string) (path, digest string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "rows.jsonl")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, id.Content([]byte(content))
}

func TestFileReadsRowsByIndex(t *testing.T) {
	t.Parallel()
	long := `{"p":"` + strings.Repeat("x", 3<<20) + `"}` // longer than the reader's buffer
	for name, c := range map[string]struct {
		content string
		want    []string
	}{
		"ends with a newline":   {"{\"a\":1}\n{\"a\":2}\n", []string{`{"a":1}`, `{"a":2}`}},
		"ends without one":      {"{\"a\":1}\n{\"a\":2}", []string{`{"a":1}`, `{"a":2}`}},
		"from Windows":          {"{\"a\":1}\r\n{\"a\":2}\r\n", []string{`{"a":1}`, `{"a":2}`}},
		"with a long row":       {"{}\n" + long + "\n[3]\n", []string{`{}`, long, `[3]`}},
		"indented, blank lines": {"\n  {\"a\":1}\n\t\n{\"ä\":2} \n", []string{`{"a":1}`, `{"ä":2}`}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path, digest := write(t, c.content)
			f, err := dataset.Open(path, digest, uint64(len(c.want)))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for n, want := range c.want {
				if got, err := f.Row(uint64(n)); err != nil || string(got) != want {
					t.Errorf("row %d: %.40s, %v", n, got, err)
				}
			}
			if _, err := f.Row(f.Rows()); err == nil {
				t.Error("a row past the end was read")
			}
		})
	}
}

func TestOpenRefusesAChangedFile(t *testing.T) {
	t.Parallel()
	path, digest := write(t, "{}\n{}\n")
	for name, c := range map[string]struct {
		path, digest string
		rows         uint64
		want         error
	}{
		"other bytes": {path, id.Content([]byte("other")), 2, dataset.ErrChanged},
		"other rows":  {path, digest, 3, dataset.ErrChanged},
		"missing":     {path + ".gone", digest, 2, dataset.ErrUnreadable},
	} {
		if _, err := dataset.Open(c.path, c.digest, c.rows); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRowRefusesAChangedFile(t *testing.T) {
	t.Parallel()
	path, digest := write(t, "{\"a\":1}\n{\"a\":2}\n")
	f, err := dataset.Open(path, digest, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.WriteFile(path, []byte("{\"a\":1}\n{\"a\":9}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Row(0); err != nil {
		t.Errorf("a row that is the same: %v", err)
	}
	if row, err := f.Row(1); !errors.Is(err, dataset.ErrChanged) {
		t.Errorf("got %s, %v", row, err)
	}
}

func ExamplePlaceOf() {
	fmt.Println(dataset.PlaceOf(25, 10))
	// Output: {2 5}
}
