//go:build recovery

package buffer_test

import (
	"context"
	"database/sql"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/audit"
	"github.com/rollout-rl/rollout/libs/id"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const (
	perCommit = 10
	manySteps = 300_000
	inFlight  = 4 * perCommit
	// moreTime is how much longer a recovery may take after all of these steps than after ten.
	moreTime = 5 * time.Second
	// moreBytes is how much more memory it may need.
	moreBytes = 16 << 20
)

// `make bench-recovery`: what scheduler and controller ask of the ledger when they resume an
// asynchronous run, after 10 steps and after 300,000 steps with 3,000,000 groups in SQLite. The
// last row is the worst case: a group of the first step is missing.
func TestRecoveryCost(t *testing.T) {
	small := recovery(t, 10, false)
	for _, early := range []bool{false, true} {
		large := recovery(t, manySteps, early)
		if more := large.recovery - small.recovery; more > moreTime {
			t.Errorf("the recovery took %v more", more)
		}
		if large.heap > small.heap+moreBytes {
			t.Errorf("the recovery needed %d MiB, that of a new run %d MiB", large.heap>>20, small.heap>>20)
		}
	}
}

type cost struct {
	recovery time.Duration
	heap     uint64 // the largest one, bytes
}

func recovery(t *testing.T, steps uint64, early bool) cost {
	t.Helper()
	s := setup(t)
	c := &bufferv1.LedgerConfig{GroupsPerStep: perCommit, GroupSize: 1, Order: bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION, Rows: 1000, MaxStaleness: 3, Receipts: true}
	s.open(c)
	s.record(0)
	s.stop()
	fill(t, filepath.Join(s.folder, "db", "buffer.sqlite"), steps, early)

	stop := watchHeap()
	began := time.Now()
	s.start()
	s.open(c)
	ask := func(req *bufferv1.ListStepsRequest) *bufferv1.StepRecord {
		t.Helper()
		req.RunId = run
		listed, err := s.client.ListSteps(t.Context(), req)
		if err != nil || len(listed.GetSteps()) != 1 || listed.GetSteps()[0].GetStep() != steps {
			t.Fatalf("%v: %v", listed, err)
		}
		return listed.GetSteps()[0]
	}
	ask(&bufferv1.ListStepsRequest{Newest: true, PageSize: 1})
	ask(&bufferv1.ListStepsRequest{FromStep: steps, PageSize: 1})
	if _, err := s.client.GetBatch(t.Context(), &bufferv1.GetBatchRequest{RunId: run, Step: steps}); err != nil {
		t.Fatalf("batch of step %d: %v", steps, err)
	}
	listed, err := s.client.ListIncompleteGroups(t.Context(), &bufferv1.ListIncompleteGroupsRequest{RunId: run, EndPosition: steps*perCommit + inFlight, PageSize: 10_000})
	want := inFlight
	if early {
		want++
	}
	if err != nil || len(listed.GetGroups()) != want {
		t.Fatalf("%d incomplete groups, want %d: %v", len(listed.GetGroups()), want, err)
	}
	out := cost{recovery: time.Since(began)}
	out.heap = stop()

	if early {
		t.Logf("%d steps, %d groups, the first one is missing: recovery %v, heap %.1f MiB", steps, steps*perCommit, out.recovery.Round(time.Millisecond), float64(out.heap)/(1<<20))
		return out
	}
	began = time.Now()
	rows, largest := export(t, s)
	t.Logf("%d steps, %d groups: recovery %v, heap %.1f MiB; export of %d rows %v, largest message %.1f MiB",
		steps, steps*perCommit, out.recovery.Round(time.Millisecond), float64(out.heap)/(1<<20), rows, time.Since(began).Round(time.Millisecond), float64(largest)/(1<<20))
	return out
}

// watchHeap measures the heap until stop, which returns by how much the largest one exceeded the
// first.
func watchHeap() (stop func() uint64) {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	base, peak, ended := m.HeapAlloc, atomic.Uint64{}, make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			peak.Store(max(peak.Load(), m.HeapAlloc))
			select {
			case <-ended:
				return
			case <-tick.C:
			}
		}
	}()
	return func() uint64 {
		close(ended)
		<-watched
		return peak.Load() - min(peak.Load(), base)
	}
}

func export(t *testing.T, s *bench) (rows, largest int) {
	t.Helper()
	stream, err := s.client.ExportLedger(t.Context(), &bufferv1.ExportLedgerRequest{RunId: run})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return rows, largest
		}
		if err != nil {
			t.Fatal(err)
		}
		rows += len(m.GetSteps()) + len(m.GetGroups()) + len(m.GetWeights()) + len(m.GetSegments())
		largest = max(largest, proto.Size(m))
	}
}

// fill writes committed steps whose groups are consumed and whose payloads are trimmed.
func fill(t *testing.T, path string, steps uint64, early bool) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	first := 0
	if early {
		first = 1
	}
	for _, statement := range []string{
		fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d)
			INSERT INTO step (ledger, step, batch, group_count, sample_count, excluded_count, weights_digest, chain, end_position)
			SELECT 1, i, 'blake3-' || printf('%%064x', i), %d, %d, 0, 'blake3-' || printf('%%064x', i + 1), 'blake3-' || printf('%%064x', i), i * %d FROM n`,
			steps, perCommit, perCommit, perCommit),
		`INSERT INTO weights (ledger, version, lineage, digest, retrained) SELECT 1, step, 0, weights_digest, 0 FROM step`,
		fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT %d UNION ALL SELECT i + 1 FROM n WHERE i < %d)
			INSERT INTO prompt_group (ledger, position, attempt, state, step, samples, min_version, arrival)
			SELECT 1, i, 0, 4, i / %d + 1, 1, i / %d, i + 1 FROM n`, first, steps*perCommit-1, perCommit, perCommit),
		fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d)
			INSERT INTO segment (ledger, number, bytes, trimmed) SELECT 1, i, 67108864, 1 FROM n`, max(1, steps/30)),
		fmt.Sprintf(`INSERT INTO sample (ledger, position, sample, part, attempt, segment, byte_offset, byte_length, crc32c, ref, reward, outcome, min_version, receipt_version)
			SELECT 1, position, 0, 0, 0, 1, 0, 10, 1, '', 1.0, 1, min_version, min_version FROM prompt_group WHERE step = %d`, steps),
		fmt.Sprintf(`UPDATE ledger SET step = %d, chain = (SELECT chain FROM step WHERE step = %d), arrivals = %d, consumed = %d, samples = %d,
			trimmed = %d, weights_version = %d, weights_digest = (SELECT weights_digest FROM step WHERE step = %d)`,
			steps, steps, steps*perCommit, steps*perCommit-uint64(first), steps*perCommit, steps, steps, steps),
	} {
		if _, err := db.ExecContext(context.Background(), statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
}

// `make bench-recovery`: the audit of a ledger with 300,000 steps, 3,000,000 groups, and as many
// samples, whose payloads are trimmed. One process exports the ledger and audits it.
func TestAuditCost(t *testing.T) {
	s := setup(t)
	s.open(&bufferv1.LedgerConfig{GroupsPerStep: perCommit, GroupSize: 1, Order: bufferv1.LeaseOrder_LEASE_ORDER_COMPLETION, Rows: 1000, MaxStaleness: 3, Receipts: true})
	s.record(0)
	s.stop()
	path := filepath.Join(s.folder, "db", "buffer.sqlite")
	fill(t, path, manySteps, false)
	link(t, path)
	s.start()

	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // begins a new maximum of the resident memory
		t.Fatal(err)
	}
	stop := watchHeap()
	began := time.Now()
	e := &audit.Evidence{Run: &runv1.Run{RunId: run}, Unscheduled: true}
	defer e.Close()
	stream, err := s.client.ExportLedger(t.Context(), &bufferv1.ExportLedgerRequest{RunId: run})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Add(m); err != nil {
			t.Fatal(err)
		}
	}
	exported := time.Since(began)
	r, err := audit.Check(e)
	if err != nil {
		t.Fatal(err)
	}
	groups := uint64(manySteps * perCommit)
	if !r.Whole || r.Steps != manySteps || r.Samples.Covered != groups {
		t.Errorf("%d steps, %+v, %d breaks: %.3v", r.Steps, r.Samples, len(r.Breaks), r.Breaks)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	resident := regexp.MustCompile(`VmHWM:\s*(.*)`).FindSubmatch(status)[1]
	t.Logf("%d steps, %d groups: export %v, audit of the exported rows %v, heap %.1f MiB, resident memory of both %s",
		manySteps, groups, exported.Round(time.Millisecond), (time.Since(began) - exported).Round(time.Millisecond), float64(stop())/(1<<20), resident)
}

// link gives every group a sample, and computes the batches and the chain of the steps.
func link(t *testing.T, path string) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	must := func(statement string, args ...any) {
		if _, err := tx.ExecContext(t.Context(), statement, args...); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
	must(`INSERT INTO sample (ledger, position, sample, part, attempt, segment, byte_offset, byte_length, crc32c, ref, reward, outcome, min_version, receipt_version)
		SELECT 1, position, 0, 0, 0, position / 300 + 1, position % 300, 10, 1, '', 1.0, 1, min_version, min_version FROM prompt_group WHERE true
		ON CONFLICT DO UPDATE SET segment = excluded.segment, byte_offset = excluded.byte_offset`)
	chain := ""
	for step := uint64(1); step <= manySteps; step++ {
		batch := []byte("rollout.batch.v1")
		for p := (step - 1) * perCommit; p < step*perCommit; p++ {
			for _, n := range []uint64{p / 1000, p % 1000, 0, 0, 0, 1} {
				batch = binary.LittleEndian.AppendUint64(batch, n)
			}
		}
		made := id.Content(batch)
		chain = id.Content(append(binary.LittleEndian.AppendUint64([]byte("rollout.chain.v1"+chain), step), fmt.Sprintf("%sblake3-%064x", made, step+1)...))
		must(`UPDATE step SET batch = ?, chain = ? WHERE ledger = 1 AND step = ?`, made, chain, step)
	}
	must(`UPDATE ledger SET chain = ?`, chain)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}
