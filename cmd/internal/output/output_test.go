package output

import (
	"bytes"
	"math"
	"testing"
	"time"

	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

func TestWords(t *testing.T) {
	t.Parallel()
	for got, want := range map[string]string{
		Bytes(0): "0 B", Bytes(999): "999 B", Bytes(1000): "1.0 kB", Bytes(999_949): "999.9 kB", Bytes(999_950): "1.0 MB", Bytes(5_400_000_000): "5.4 GB",
		Bytes(7_000_000_000_000_000): "7000.0 TB",
		Count(12):                    "12", Count(123): "123", Count(1234): "1,234", Count(-1234567): "-1,234,567", Count(-123): "-123", Count(1139.6): "1,140",
		Duration(-time.Second): "0 s", Duration(1500 * time.Millisecond): "1.5 s", Duration(42 * time.Second): "42 s", Duration(185 * time.Second): "3 min 5 s",
		Duration(130 * time.Minute): "2 h 10 min",
		Number(0):                   "0", Number(3): "3", Number(0.5): "0.500", Number(-0.00012): "-1.20e-04", Number(123.45): "123.5", Number(12345.6): "12,346", Number(math.NaN()): "nan",
		Short("blake3-0123456789abcdef"): "blake3-0123456789ab", Short("x"): "x",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	var table Table
	table.Row("RUN", "\x1b[1mNAME\x1b[0m", "STEP")
	table.Row("run-1", "日本", "3")
	table.Row("r")
	if got, want := table.String(), "RUN    \x1b[1mNAME\x1b[0m  STEP\nrun-1  日本  3\nr\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestJSONIsStable(t *testing.T) {
	t.Parallel()
	run := &runv1.Run{RunId: "run-1", Step: 1 << 60, State: runv1.RunState_RUN_STATE_RUNNING}
	var first bytes.Buffer
	if err := Document(&first, run); err != nil {
		t.Fatal(err)
	}
	for range 20 { // protojson draws its spacing once a process; the bytes must not have any of it
		var again bytes.Buffer
		if err := Document(&again, run); err != nil || again.String() != first.String() {
			t.Fatalf("%v\n%s\n%s", err, first.String(), again.String())
		}
	}
	if !bytes.Contains(first.Bytes(), []byte("\n  \"step\": \"1152921504606846976\",\n")) {
		t.Error(first.String())
	}
	var line bytes.Buffer
	if err := Line(&line, "run", &runv1.ResumeRunRequest{RunId: "x"}); err != nil || line.String() != "{\"run\":{\"run_id\":\"x\"}}\n" {
		t.Errorf("%v %q", err, line.String())
	}
}
