package proto_test

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"buf.build/gen/go/bufbuild/protovalidate/protocolbuffers/go/buf/validate"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/learner/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/reward/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	_ "github.com/rollout-rl/rollout/proto/gen/rollout/tensor/v1"
)

// bounded are repeated fields of responses that do not grow with a run, or with the number of runs,
// workers, sessions and snapshots, or that the request bounds. A name that ends with a dot is a
// whole message or package.
var bounded = map[string]string{
	"rollout.config.v1.":                                   "a configuration is part of a plan",
	"rollout.plan.v1.":                                     "a plan, of which CreateRun takes at most 16 MiB",
	"rollout.plugin.v1.":                                   "a plugin answers about the samples of one request",
	"rollout.reward.v1.":                                   "a result for each sample of one request",
	"rollout.inference.v1.":                                "a completion of the prompts of one request, or the state of one worker",
	"rollout.trajectory.v1.":                               "one trajectory, whose length the context window limits",
	"rollout.session.v1.Segment.":                          "one segment, whose length the context window limits",
	"rollout.tensor.v1.":                                   "one tensor, or one item that two ranks exchange",
	"rollout.weights.v1.":                                  "the tensors of one version, whose number the model has",
	"rollout.wait.v1.":                                     "a wait names a few of what it waits for",
	"rollout.event.v1.Event.":                              "one event; AppendEvents takes no larger message",
	"rollout.buffer.v1.Batch.samples":                      "one batch, whose size the plan has",
	"rollout.buffer.v1.LeaseBatchResponse.waits":           "one wait for each cause",
	"rollout.buffer.v1.LedgerState.dissolved":              "groups in flight, whose number the plan limits; the scheduler issues them again at once",
	"rollout.buffer.v1.LedgerState.failures":               "64 reasons",
	"rollout.buffer.v1.LedgerSeed.run_ids":                 "one run for each restore in the ancestry",
	"rollout.buffer.v1.GetMissingResponse.groups":          "one for each of at most 4,096 groups of the request",
	"rollout.buffer.v1.MissingSamples.samples":             "the samples of one group",
	"rollout.buffer.v1.PutTrajectoriesResponse.results":    "one for each put of the request",
	"rollout.buffer.v1.PutResult.refused":                  "at most one for each trajectory of the put",
	"rollout.buffer.v1.ReadPayloadsResponse.":              "a message of a stream, at most a few MiB",
	"rollout.buffer.v1.ExportLedgerResponse.":              "a message of a stream, with the rows of at most 10,000 steps or 512 positions",
	"rollout.buffer.v1.CutLedgerResponse.":                 "a message of a stream, at most a few MiB",
	"rollout.buffer.v1.SampleRecord.spans":                 "one sample",
	"rollout.gateway.v1.ListWaitsResponse.waits":           "one wait for each cause",
	"rollout.gateway.v1.Model.weights_versions":            "the versions that its workers hold at the same time, two of each",
	"rollout.gateway.v1.NextPromptsResponse.sessions":      "at most 256 groups, as the request asks for",
	"rollout.gateway.v1.SessionEnd.":                       "one session: 64 metrics, and a reason for each leaf of its tree",
	"rollout.key.v1.SyncApiKeysResponse.keys":              "people make keys; 100,000 of them fit in a message",
	"rollout.learner.v1.Completion.":                       "one completion",
	"rollout.learner.v1.CutRunResponse.snapshots":          "one for each kind",
	"rollout.learner.v1.EvaluateLossResponse.metrics":      "one for each name",
	"rollout.learner.v1.OfferWeightsResponse.offers":       "one for each form of a version",
	"rollout.learner.v1.Progress.":                         "the workers of one run, whose number the plan limits",
	"rollout.learner.v1.SaveStateResponse.files":           "the files of one training state, whose number the model has",
	"rollout.learner.v1.TrainResult.":                      "one step: its metrics, and the few completions that are stored",
	"rollout.run.v1.DeleteRunResponse.kept_snapshots":      "snapshots of one run that others started from",
	"rollout.run.v1.Queues.failures":                       "64 reasons",
	"rollout.run.v1.RunStatus.":                            "the workers of one run, whose number the plan limits",
	"rollout.run.v1.Assignment.":                           "what one process is started with",
	"rollout.run.v1.Worker.waits":                          "one wait for each cause",
	"rollout.run.v1.VerifyWorkersResponse.accepted":        "one for each registration of the request",
	"rollout.snapshot.v1.DeleteRunResponse.kept":           "snapshots of one run that others started from",
	"rollout.snapshot.v1.Episode.":                         "one episode, whose length the context window limits",
	"rollout.snapshot.v1.Snapshot.":                        "the files of one snapshot, whose number the model and the plan have",
	"rollout.snapshot.v1.TakeSnapshotsResponse.snapshots":  "one for each kind",
	"rollout.snapshot.v1.VerifySnapshotResponse.flaws":     "one for each damaged range, of which adjacent blocks of 1 MiB are one",
	"rollout.storage.v1.ImportArtifactsResponse.artifacts": "one for each file of the request",
	"rollout.storage.v1.StatArtifactsResponse.artifacts":   "one for each content id of the request",
	"rollout.storage.v1.TelemetrySeries.buckets":           "a message of a stream; telemetry becomes coarser with age",
	"rollout.storage.v1.Series.points":                     "page_size counts points",
	"rollout.storage.v1.TailEventsResponse.events":         "a message of a stream, at most a page",
}

// streams are server streams without a position at which a client resumes them.
var streams = map[string]string{
	"rollout.storage.v1.EventService.QueryTelemetry":            "what is stored at one moment; a call that broke is repeated",
	"rollout.buffer.v1.BufferService.ReadPayloads":              "one batch; reading it again has no effect",
	"rollout.buffer.v1.BufferService.ExportLedger":              "the rows of one moment, which ends with the call; an audit begins again",
	"rollout.buffer.v1.BufferService.CutLedger":                 "the rows of one moment, which ends with the call; a snapshot begins again",
	"rollout.buffer.v1.BufferService.WatchLedger":               "each message is the whole current state, so a new stream loses nothing",
	"rollout.learner.v1.LearnerControllerService.WatchProgress": "each message is the whole current state, so a new stream loses nothing",
	"rollout.run.v1.SchedulerService.WatchRun":                  "each message is the whole current state, so a new stream loses nothing",
	"rollout.run.v1.PlaceService.Join":                          "a place is offered as long as the stream lasts",
	"rollout.serving.v1.ServingService.ServeModel":              "the model is served as long as the stream lasts",
	"rollout.gateway.v1.RolloutGatewayService.Complete":         "a request with the same seed samples the same tokens; the session has what was delivered",
	"rollout.inference.v1.InferenceWorkerService.Generate":      "the gateway continues at another worker with the tokens that it has",
	"rollout.inference.v1.InferenceWorkerService.Evaluate":      "an evaluation that a worker did not finish begins again",
	"rollout.learner.v1.LearnerWorkerService.Train":             "a step that was not finished is trained again",
}

// resumes are the fields of requests that name the position at which a stream begins.
var resumes = []string{"offset", "after_sequence"}

// Every method returns a page, or something of bounded size, or a stream that a client can resume.
func TestEveryListIsPagedOrBounded(t *testing.T) {
	t.Parallel()
	unused := map[string]bool{}
	for name := range bounded {
		unused[name] = true
	}
	for name := range streams {
		unused[name] = true
	}
	for _, method := range methods(t) {
		name := string(method.FullName())
		request, response := method.Input().Fields(), method.Output().Fields()
		paged := response.ByName("next_page_token") != nil
		if paged {
			checkPage(t, name, request)
		}
		if method.IsStreamingServer() {
			delete(unused, name)
			if resume := resumable(method.Input()); !resume && streams[name] == "" {
				t.Errorf("%s is a stream without a position in its request (%s); add one, or say in streams why it needs none", name, strings.Join(resumes, ", "))
			} else if resume && streams[name] != "" {
				t.Errorf("%s can be resumed; remove it from streams", name)
			}
		}
		for _, field := range lists(method.Output(), paged) {
			rule := ruleOf(field)
			delete(unused, rule)
			if rule == "" {
				t.Errorf("%s returns all of %s; add page_size, page_token, and next_page_token, or say in bounded what limits it", name, field)
			}
		}
	}
	for name := range unused {
		t.Errorf("%s is exempt, but no method returns it", name)
	}
}

// methods returns the methods of all contracts.
func methods(t *testing.T) (all []protoreflect.MethodDescriptor) {
	t.Helper()
	files, err := filepath.Glob("rollout/*/v1/*.proto")
	if err != nil || len(files) == 0 {
		t.Fatalf("no contracts: %v", err)
	}
	for _, path := range files {
		file, err := protoregistry.GlobalFiles.FindFileByPath(path)
		if err != nil {
			t.Fatalf("%s is not imported by this test: %v", path, err)
		}
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for k := range service.Methods().Len() {
				all = append(all, service.Methods().Get(k))
			}
		}
	}
	return all
}

// checkPage checks that a request for a page has a token, and a size with a limit.
func checkPage(t *testing.T, method string, request protoreflect.FieldDescriptors) {
	t.Helper()
	if token := request.ByName("page_token"); token == nil || token.Kind() != protoreflect.StringKind {
		t.Errorf("%s returns a next_page_token and takes no page_token", method)
	}
	size := request.ByName("page_size")
	if size == nil || size.Kind() != protoreflect.Uint32Kind {
		t.Errorf("%s returns pages and takes no page_size", method)
		return
	}
	rules, _ := proto.GetExtension(size.Options(), validate.E_Field).(*validate.FieldRules)
	if most := rules.GetUint32().GetLte(); most == 0 || most > 100_000 {
		t.Errorf("%s: page_size is at most %d; it needs a limit (uint32.lte)", method, most)
	}
}

// resumable reports whether a request, or a message in it, has the position of a stream.
func resumable(request protoreflect.MessageDescriptor) bool {
	for i := range request.Fields().Len() {
		field := request.Fields().Get(i)
		if slices.Contains(resumes, string(field.Name())) || field.Message() != nil && field.Name() == "filter" && resumable(field.Message()) {
			return true
		}
	}
	return false
}

// lists returns the names of the repeated fields of a message and of those in it. The ones at the
// top of a page are left out.
func lists(message protoreflect.MessageDescriptor, page bool) []string {
	found, seen := map[string]bool{}, map[protoreflect.FullName]bool{}
	var visit func(m protoreflect.MessageDescriptor, top bool)
	visit = func(m protoreflect.MessageDescriptor, top bool) {
		if seen[m.FullName()] {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			field := m.Fields().Get(i)
			if (field.IsList() || field.IsMap()) && (!top || !page) {
				found[string(field.FullName())] = true
			}
			if field.Message() != nil {
				visit(field.Message(), false)
			}
		}
	}
	visit(message, true)
	return slices.Sorted(maps.Keys(found))
}

// ruleOf returns the name in bounded that has a field, or "".
func ruleOf(field string) string {
	if bounded[field] != "" {
		return field
	}
	for at, c := range field {
		if c == '.' && bounded[field[:at+1]] != "" {
			return field[:at+1]
		}
	}
	return ""
}
