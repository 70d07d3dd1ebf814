package id_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/structpb"

	"github.com/rollout-rl/rollout/libs/id"
)

func TestRun(t *testing.T) {
	t.Parallel()
	early, late := id.NewRun(time.UnixMilli(1)), id.NewRun(time.UnixMilli(2))
	if !id.ValidRun(early) || early >= late || early != strings.ToLower(early) {
		t.Fatalf("%s then %s", early, late)
	}
	for _, bad := range []string{"", "run-", "run-x", strings.ToUpper(early), early + "0", "run-../../etc", "ran" + early[3:]} {
		if id.ValidRun(bad) {
			t.Errorf("%q passes", bad)
		}
	}
}

func TestAt(t *testing.T) {
	t.Parallel()
	first := id.At(time.UnixMilli(1), "a")
	if !id.Valid(first) || first != id.At(time.UnixMilli(1), "a") {
		t.Fatalf("%s, then %s", first, id.At(time.UnixMilli(1), "a"))
	}
	if later, other := id.At(time.UnixMilli(2), "a"), id.At(time.UnixMilli(1), "b"); first >= later || first == other {
		t.Errorf("%s; later %s, of another seed %s", first, later, other)
	}
}

func TestContent(t *testing.T) {
	t.Parallel()
	// The empty-input vector of the blake3 reference.
	const empty = "blake3-af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
	if got := id.Content(nil); got != empty {
		t.Fatalf("got %s", got)
	}
	data := bytes.Repeat([]byte("rollout"), 100_000)
	got, size, err := id.ContentOf(bytes.NewReader(data))
	if err != nil || got != id.Content(data) || size != int64(len(data)) {
		t.Fatalf("got %s %d %v", got, size, err)
	}
	if !id.ValidContent(got) || id.ValidContent(got[:70]) || id.ValidContent("blake3-"+strings.Repeat("G", 64)) {
		t.Error("ValidContent")
	}
}

// The first four rows are examples of RFC 8785.
func TestCanonicalize(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		`{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001], "literals": [null, true, false]}`: `{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27]}`,
		`"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/"`:                                                                     "\"€$\\u000f\\nA'B\\\"\\\\\\\\\\\"/\"",
		`{"\ufb33":1,"\ud83d\ude00":2,"\u20ac":3,"\r":4}`:                                                                     "{\"\\r\":4,\"€\":3,\"😀\":2,\"\ufb33\":1}",
		`[-0, 1e21, 999999999999999900000, 0.000001, 1e-7]`:                                                                   `[0,1e+21,999999999999999900000,0.000001,1e-7]`,
		` { } `: `{}`,
	} {
		got, err := id.Canonicalize([]byte(in))
		if err != nil || string(got) != want {
			t.Errorf("%s\n got %s\nwant %s (%v)", in, got, want, err)
		}
	}
	for _, bad := range []string{`{`, `1 2`, `1e999`} {
		if _, err := id.Canonicalize([]byte(bad)); err == nil {
			t.Errorf("%q passes", bad)
		}
	}
}

func TestMessageIsStable(t *testing.T) {
	t.Parallel()
	m, err := structpb.NewStruct(map[string]any{"b": 1.5, "a": []any{"x", nil}})
	if err != nil {
		t.Fatal(err)
	}
	first, err := id.Message(m)
	if err != nil {
		t.Fatal(err)
	}
	if want := id.Content([]byte(`{"a":["x",null],"b":1.5}`)); first != want {
		t.Errorf("got %s want %s", first, want)
	}
	m.Fields["b"] = structpb.NewNumberValue(2)
	if second, _ := id.Message(m); second == first {
		t.Error("another message has the same id")
	}
}
