package config

import (
	"encoding/json"
	"maps"
	"os"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// defaultTables reads the three tables of schemas/golden/algorithm_defaults.txt by row and column.
// The cells are JSON.
func defaultTables(t *testing.T) (run, algorithms, byAlgorithm map[string]map[string]string) {
	t.Helper()
	text, err := os.ReadFile("../../../schemas/golden/algorithm_defaults.txt")
	if err != nil {
		t.Fatal(err)
	}
	var tables []map[string]map[string]string
	for block := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n\n") {
		var columns []string
		table := map[string]map[string]string{}
		for line := range strings.Lines(block) {
			cells := strings.Fields(line)
			switch {
			case strings.HasPrefix(line, "#"):
			case columns == nil:
				columns = cells[1:]
			default:
				table[cells[0]] = map[string]string{}
				for i, cell := range cells[1:] {
					table[cells[0]][columns[i]] = cell
				}
			}
		}
		tables = append(tables, table)
	}
	return tables[0], tables[1], tables[2]
}

// defaultsOf returns the values that the text does not set, by their paths in TOML.
func defaultsOf(r *Reading) map[string]any {
	out := map[string]any{}
	addDefaults(r.Config.ProtoReflect(), "", out)
	maps.DeleteFunc(out, func(path string, _ any) bool { return r.Wrote(path) })
	delete(out, "mode") // a column of the table
	return out
}

func addDefaults(m protoreflect.Message, at string, out map[string]any) {
	for _, field := range keysOf(m.Descriptor()) {
		path, holder := join(at, field.TextName()), field.holder(m)
		switch {
		case field.IsMap() || field.IsList() || !holder.Has(field.FieldDescriptor):
		case field.Message() != nil:
			addDefaults(field.value(m).Message(), path, out)
		case field.defaultText() != "" || path == "deterministic":
			out[path] = field.value(m).Interface()
		}
	}
}

func TestEffectiveDefaultsMatchTheGoldenTable(t *testing.T) {
	t.Parallel()
	run, algorithms, byAlgorithm := defaultTables(t)
	for i, mode := range []string{"sync", "async"} {
		for _, table := range oneofTables("algorithm") {
			name := strings.TrimSuffix(strings.TrimPrefix(table, "[algorithm."), "]")
			got := defaultsOf(read(t, as(name), "mode="+mode))
			for path := range run {
				if _, ok := got[path]; !ok && path != "sampling.group_size" { // keys that the text sets
					t.Errorf("%s, %s: `%s` has no default", name, mode, path)
				}
			}
			for path, value := range got {
				if byAlgorithm[path] != nil {
					continue // TestDefaultsByAlgorithmMatchTheGoldenTable
				}
				want, known := run[path][mode]
				if key, ok := strings.CutPrefix(path, "algorithm."+name+"."); ok {
					want = algorithms[key][name]
					known = want != "" && want != "-"
					if both := strings.Split(want, "|"); len(both) > 1 {
						want = both[i]
					}
				}
				if written, _ := json.Marshal(value); !known || !sameJSON(want, string(written)) {
					t.Errorf("%s, %s: `%s` is %s by default, and %q in the golden table", name, mode, path, written, want)
				}
			}
		}
	}
}

// TestDefaultsByAlgorithmMatchTheGoldenTable: the defaults of keys outside of the algorithm's table
// depend on the algorithm and on adapters.
func TestDefaultsByAlgorithmMatchTheGoldenTable(t *testing.T) {
	t.Parallel()
	_, _, byAlgorithm := defaultTables(t)
	for path, row := range byAlgorithm {
		for _, table := range oneofTables("algorithm") {
			name := strings.TrimSuffix(strings.TrimPrefix(table, "[algorithm."), "]")
			full, adapters, _ := strings.Cut(row[name], "|")
			for want, set := range map[string]string{full: "seed=0", adapters: "lora.rank=8"} {
				if got := read(t, as(name), set).Value(path); !sameJSON(got, want) {
					t.Errorf("%s, %s: `%s` is %s by default, and %q in the golden table", name, set, path, got, want)
				}
			}
			if got := read(t, as(name), path+"=0.125").Value(path); got != "0.125" {
				t.Errorf("%s: `%s = 0.125` is %s", name, path, got)
			}
		}
	}
}

func sameJSON(a, b string) bool {
	var x, y any
	return json.Unmarshal([]byte(a), &x) == nil && json.Unmarshal([]byte(b), &y) == nil && x == y
}
