package document

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// dump is a tree with every place: `key@line:column = value@line:column`.
func dump(v *Value, indent string) string {
	var b strings.Builder
	for _, e := range v.Entries {
		line, column := e.Span.Position()
		valueLine, valueColumn := e.Value.Span.Position()
		fmt.Fprintf(&b, "%s%s@%d:%d %d:%d <%s>\n", indent, e.Key, line, column, valueLine, valueColumn, e.Value.Span.Text())
		if e.Value.Kind == Table {
			b.WriteString(dump(e.Value, indent+"  "))
		}
	}
	return b.String()
}

func TestPlaces(t *testing.T) {
	t.Parallel()
	root, faults := Parse(NewSource("run.toml", []byte(`a = 1 # one
  "b c" . d = 'x'
"é" = ["ü", 2,
  3]
[ t . u ]   # header
k = { x = 1.5, y = { z = true } }
[t]
v = """
long"""
`), 1))
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	want := `a@1:1 1:5 <1>
b c@2:3 2:3 <"b c">
  d@2:11 2:15 <'x'>
é@3:1 3:7 <["ü", 2,>
t@7:2 7:1 <[t]>
  u@5:7 5:1 <[ t . u ]>
    k@6:1 6:5 <{>
      x@6:7 6:11 <1.5>
      y@6:16 6:20 <{>
        z@6:22 6:26 <true>
  v@8:1 8:5 <""">
`
	if diff := cmp.Diff(want, dump(root, "")); diff != "" {
		t.Error(diff)
	}
}

func TestParseContinuesAfterAMistake(t *testing.T) {
	t.Parallel()
	root, faults := Parse(NewSource("run.toml", []byte("a = x\nb = 1\nc = \"open\nd 4\n[e\n[f]\ng = 2\nh = [1\n"), 1))
	var places []string
	for _, fault := range faults {
		line, column := fault.Span.Position()
		places = append(places, fmt.Sprintf("%d:%d <%s>", line, column, fault.Span.Text()))
	}
	if diff := cmp.Diff([]string{"1:5 <x>", `3:5 <"open>`, "4:3 <4>", "5:3 <>", "8:6 <1>"}, places); diff != "" {
		t.Error(diff)
	}
	if root.Find("b") == nil || root.Find("f.g") == nil {
		t.Errorf("keys after a mistake are missing:\n%s", dump(root, ""))
	}
}

func TestDuplicateKeysAndTables(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"a = 1\na = 2\n":                     "key `a` is set twice, first on line 1",
		"[a]\n[b]\n[a]\n":                    "table [a] is set twice, first on line 1",
		"a = 1\n[a]\n":                       "table [a] is set twice, first on line 1",
		"a = 1\na.b = 2\n":                   "key `a` is set twice, first on line 1",
		"a = {b = 1}\na.c = 2\n":             "key `a` is set twice, first on line 1",
		"[a.b]\n[a]\nc = 1\n":                "",
		"a.b = 1\na.c = 2\n":                 "",
		"[[a]]\n":                            "a configuration has no arrays of tables",
		"[a]\nb = 1\n[c]\n[a]\nb = 2\nd = 3": "table [a] is set twice, first on line 1; key `b` is set twice, first on line 2",
	} {
		_, faults := Parse(NewSource("run.toml", []byte(text), 1))
		var got []string
		for _, fault := range faults {
			got = append(got, fault.Message)
		}
		if strings.Join(got, "; ") != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
