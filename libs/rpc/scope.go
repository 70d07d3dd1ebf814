package rpc

import (
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// ErrScope means that the key is valid but its scope does not allow the call.
var ErrScope = rpcerr.New(codes.PermissionDenied, "SCOPE_INSUFFICIENT", "the API key may not do that")

// scopes has the required scope of each method. A method that is missing here is for the mesh token
// only; a test lists the missing ones.
var scopes = table(map[apikey.Scope]map[string]string{
	apikey.Any:     {"rollout.gateway.v1.RolloutGatewayService": "ListModels"},
	apikey.Sample:  {"rollout.gateway.v1.RolloutGatewayService": "Complete"},
	apikey.Session: {"rollout.gateway.v1.RolloutGatewayService": "NextPrompts CloseSession"},
	apikey.Read: {
		"rollout.plan.v1.PlannerService":              "ValidateConfig",
		"rollout.run.v1.SchedulerService":             "GetRun ListRuns WatchRun",
		"rollout.serving.v1.ServingService":           "ListServings",
		"rollout.gateway.v1.RolloutGatewayService":    "GetSession ListWaits",
		"rollout.buffer.v1.BufferService":             "GetMissing GetBatch ListSteps ListGroups ListIncompleteGroups ReadPayloads WatchLedger ExportLedger",
		"rollout.learner.v1.LearnerControllerService": "GetProgress WatchProgress",
		"rollout.snapshot.v1.SnapshotService":         "GetSnapshot ListSnapshots VerifySnapshot ListEpisodes",
		"rollout.storage.v1.ArtifactService":          "GetArtifact StatArtifacts",
		"rollout.storage.v1.EventService":             "ListEvents TailEvents QueryMetrics QueryTelemetry",
		"grpc.reflection.v1.ServerReflection":         "ServerReflectionInfo",
		"grpc.reflection.v1alpha.ServerReflection":    "ServerReflectionInfo",
	},
	apikey.Submit: {
		// Planning imports the reward that a configuration names, and so runs the caller's code.
		"rollout.plan.v1.PlannerService":  "CreatePlan RenewPlan VerifyPlan",
		"rollout.run.v1.SchedulerService": "CreateRun CancelRun PauseRun ResumeRun",
		// ServeModel starts an interpreter that the caller names.
		"rollout.serving.v1.ServingService": "ServeModel StopServing",
		// MaterializeSnapshot writes to a folder of the host that the caller chooses; `rollout replay`
		// and `rollout export` need it. It gives no more access than submit, which can run any code as
		// the user of the services: it only writes a snapshot's files.
		"rollout.snapshot.v1.SnapshotService": "CreateSnapshot TakeSnapshots MaterializeSnapshot RestoreSnapshot PinSnapshot",
		"rollout.storage.v1.ArtifactService":  "PutArtifact",
	},
	apikey.Admin: {
		"rollout.run.v1.SchedulerService":     "DeleteRun",
		"rollout.snapshot.v1.SnapshotService": "DeleteSnapshot RecoverSnapshots",
		// These read and write files of the host that the caller names.
		"rollout.storage.v1.ArtifactService": "ImportArtifacts ExportArtifacts DeleteArtifacts",
		"rollout.buffer.v1.BufferService":    "ExcludeGroups ReissueGroups TrimPayloads",
		"rollout.key.v1.ApiKeyService":       "CreateApiKey ListApiKeys RevokeApiKey",
	},
	apikey.Mesh: {
		"rollout.run.v1.SchedulerInternalService":     "CompleteRun GetCursor GetProject GetStanding VerifyWorkers",
		"rollout.run.v1.PlaceService":                 "Join",
		"rollout.buffer.v1.BufferService":             "OpenLedger CloseLedger RecordWeights PutTrajectories LeaseBatch CommitStep CutLedger DeleteRun",
		"rollout.learner.v1.LearnerControllerService": "StartRun StopRun CutRun DeleteRun",
		"rollout.gateway.v1.RolloutGatewayService":    "DeleteRun",
		"rollout.snapshot.v1.SnapshotService":         "UnpinSnapshot SaveEpisodes DropEpisodes AdoptEpisodes DeleteRun",
		"rollout.storage.v1.EventService":             "AppendEvents DeleteRun",
		"rollout.key.v1.ApiKeyInternalService":        "SyncApiKeys",
	},
})

func table(by map[apikey.Scope]map[string]string) map[string]apikey.Scope {
	out := map[string]apikey.Scope{}
	for scope, services := range by {
		for service, methods := range services {
			for method := range strings.FieldsSeq(methods) {
				out["/"+service+"/"+method] = scope
			}
		}
	}
	return out
}

// scopeOf returns the scope that a method requires.
func scopeOf(method string) apikey.Scope {
	if scope, ok := scopes[method]; ok {
		return scope
	}
	return apikey.Mesh
}

func insufficient(key *apikey.Record, needed apikey.Scope) error {
	e := ErrScope.WithMessage("the API key %s has the scope %s, and this asks for %s", key.GetName(), key.GetScope(), needed).
		With("scope", key.GetScope()).With("needed", string(needed))
	if needed == apikey.Mesh {
		return e.Fix("no key may: it is what processes of the mesh do among themselves")
	}
	return e.Fix("use a key of that scope; who runs the control plane makes one: `rollout keys create NAME --scope " + string(needed) + "`")
}
