package buffer_test

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/rollout-rl/rollout/libs/fence"
	"github.com/rollout-rl/rollout/libs/fence/fencetest"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/sqldb"
	"github.com/rollout-rl/rollout/libs/sqldb/sqldbtest"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// unfenced are the calls that change a ledger and are decided by no leader.
var unfenced = []protoreflect.Name{
	"PutTrajectories", // of samplers; the ledger validates and deduplicates each
}

// reading are the calls that change nothing.
var reading = []protoreflect.Name{
	"GetMissing", "GetBatch", "ListSteps", "ListGroups", "ListIncompleteGroups", "ReadPayloads", "WatchLedger", "ExportLedger", "CutLedger",
}

// A leader is suspended between a decision and its call, a successor acts, and the old one
// continues: for every call that changes a ledger.
func TestAFormerLeaderChangesNothing(t *testing.T) {
	t.Parallel()
	s := setup(t)
	ctx := t.Context()
	var batch *bufferv1.Batch
	leaders := map[string]func(incarnation uint32, epoch uint64) *fencev1.Fence{"scheduler": fencetest.Scheduler, "controller": fencetest.Controller}
	type call struct {
		name protoreflect.Name
		role string
		call func(by *fencev1.Fence) error
	}
	calls := []call{
		{"OpenLedger", "scheduler", func(by *fencev1.Fence) error {
			_, err := s.client.OpenLedger(ctx, &bufferv1.OpenLedgerRequest{RunId: run, Config: ledgerConfig(), Fence: by})
			return err
		}},
		{"RecordWeights", "controller", func(by *fencev1.Fence) error {
			_, err := s.client.RecordWeights(ctx, &bufferv1.RecordWeightsRequest{RunId: run, Version: 0, Digest: digest(0), Fence: by})
			return err
		}},
		{"LeaseBatch", "controller", func(by *fencev1.Fence) error {
			r, err := s.client.LeaseBatch(ctx, &bufferv1.LeaseBatchRequest{RunId: run, Step: 1, Fence: by})
			batch = r.GetBatch()
			return err
		}},
		{"CommitStep", "controller", func(by *fencev1.Fence) error {
			_, err := s.client.CommitStep(ctx, &bufferv1.CommitStepRequest{
				RunId: run, Step: 1, BatchId: batch.GetBatchId(), WeightsDigest: digest(1), Trim: true, Fence: by,
			})
			return err
		}},
		{"ReissueGroups", "scheduler", func(by *fencev1.Fence) error {
			_, err := s.client.ReissueGroups(ctx, &bufferv1.ReissueGroupsRequest{RunId: run, Groups: keys(2, 1), Fence: by})
			return err
		}},
		{"ExcludeGroups", "scheduler", func(by *fencev1.Fence) error {
			_, err := s.client.ExcludeGroups(ctx, &bufferv1.ExcludeGroupsRequest{RunId: run, Groups: keys(3, 0), Reason: "X", Fence: by})
			return err
		}},
		{"TrimPayloads", "controller", func(by *fencev1.Fence) error {
			_, err := s.client.TrimPayloads(ctx, &bufferv1.TrimPayloadsRequest{RunId: run, ThroughStep: 1, Fence: by})
			return err
		}},
		{"CloseLedger", "scheduler", func(by *fencev1.Fence) error {
			_, err := s.client.CloseLedger(ctx, &bufferv1.CloseLedgerRequest{RunId: run, Fence: by})
			return err
		}},
		{"DeleteRun", "scheduler", func(by *fencev1.Fence) error {
			_, err := s.client.DeleteRun(ctx, &bufferv1.DeleteRunRequest{RunId: run, Fence: by})
			return err
		}},
	}
	open := calls[0].call
	if err := open(fencetest.Scheduler(2, 5)); err != nil {
		t.Fatal(err)
	}
	if err := calls[1].call(fencetest.Controller(2, 5)); err != nil {
		t.Fatal(err)
	}
	s.publish(slices.Concat(groupOf(0, 0, 0), groupOf(1, 0, 0), groupOf(3, 0, 0))...)
	s.publish(failed(sampleOf(2, 0, 0), trajectoryv1.Outcome_OUTCOME_INFRA_FAILED, "X"))
	s.until("every sample", func(l *bufferv1.LedgerState) bool { return l.GetReady() == 3 && len(l.GetDissolved()) == 1 })

	state := func() string { return sqldbtest.Dump(t, sqldb.Files(s.folder+"/db"), "buffer") }
	for _, c := range calls {
		before := state()
		for what, by := range map[string]*fencev1.Fence{
			"of a former leader":       leaders[c.role](2, 4),
			"of an older incarnation":  leaders[c.role](1, 5),
			"of neither, but unsigned": nil,
		} {
			if err := c.call(by); !fence.Refused(err) {
				t.Errorf("%s %s: %v", c.name, what, err)
			}
		}
		if after := state(); after != before {
			t.Errorf("a refused %s changed\n%s to\n%s", c.name, before, after)
		}
		if err := c.call(leaders[c.role](2, 5)); err != nil {
			t.Errorf("%s of the leader: %v", c.name, err)
		}
		if c.name != "OpenLedger" && c.name != "RecordWeights" && state() == before { // those two have happened before
			t.Errorf("%s of the leader changed nothing", c.name)
		}
		if c.name == "TrimPayloads" {
			s.restart()
		}
	}
	if err := open(fencetest.Scheduler(2, 4)); !fence.Refused(err) {
		t.Errorf("a former scheduler opens the ledger of a deleted run: %v", err)
	}
	if err := open(fencetest.Scheduler(2, 5)); rpcerr.Reason(err) != "RUN_DELETED" {
		t.Errorf("the scheduler opens the ledger of a deleted run: %v", err)
	}
	if got := sqldbtest.Rows(t, sqldb.Files(s.folder+"/db"), "buffer"); got["ledger"] != 0 || got["fence_run"] != 0 {
		t.Errorf("left of the deleted run: %v", got)
	}

	methods := bufferv1.File_rollout_buffer_v1_buffer_proto.Services().ByName("BufferService").Methods()
	for i := range methods.Len() {
		name := methods.Get(i).Name()
		tested := slices.ContainsFunc(calls, func(c call) bool { return c.name == name })
		if !tested && !slices.Contains(unfenced, name) && !slices.Contains(reading, name) {
			t.Errorf("%s is a new call: add it to this test", name)
		}
	}
}
