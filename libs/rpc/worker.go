package rpc

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// ErrRole means that the credential of a worker does not permit the call.
var ErrRole = rpcerr.New(codes.PermissionDenied, "WORKER_ROLE", "the credential of the worker does not permit this")

// roles has the methods that workers may call, by role. Each call is about the run of the
// credential; free methods find artifacts by their content and name no run.
var (
	roles = map[string][]string{
		"inference": {
			"/rollout.buffer.v1.BufferService/GetMissing", putArtifact, getArtifact, "/rollout.snapshot.v1.SnapshotService/SaveEpisodes",
			"/rollout.snapshot.v1.SnapshotService/ListEpisodes", "/rollout.snapshot.v1.SnapshotService/DropEpisodes",
			"/rollout.run.v1.SchedulerInternalService/VerifyWorkers",
		},
		"learner": {
			"/rollout.buffer.v1.BufferService/ReadPayloads", putArtifact, getArtifact, statArtifacts, "/rollout.storage.v1.ArtifactService/DeleteArtifacts",
		},
		"sinks": {"/rollout.storage.v1.EventService/TailEvents", "/rollout.storage.v1.EventService/AppendEvents"},
	}
	free = []string{putArtifact, getArtifact, statArtifacts}
)

const (
	putArtifact   = "/rollout.storage.v1.ArtifactService/PutArtifact"
	getArtifact   = "/rollout.storage.v1.ArtifactService/GetArtifact"
	statArtifacts = "/rollout.storage.v1.ArtifactService/StatArtifacts"
)

type claimsKey struct{}

// asWorker returns the context of a call with the credential of a worker; false if the text is
// none. credential.ErrExpired, credential.ErrRevoked, ErrRole.
func (a authenticator) asWorker(ctx context.Context, method, text string) (context.Context, bool, error) {
	claims, ok, err := a.workers.Check(ctx, text)
	if !ok || err != nil {
		return ctx, ok, err
	}
	if !slices.Contains(roles[claims.Role], method) {
		return ctx, true, ErrRole.With("role", claims.Role).WithMessage("the credential of a worker of the role %s does not permit %s", claims.Role, strings.TrimPrefix(method, "/"))
	}
	return context.WithValue(ctx, claimsKey{}, claims), true, nil
}

// checkRun returns ErrRole if a worker's request is about another run than its own, or names none.
func checkRun(ctx context.Context, method string, m proto.Message) error {
	claims, ok := ctx.Value(claimsKey{}).(credential.Claims)
	if !ok {
		return nil
	}
	runs := runsIn(m.ProtoReflect())
	if len(runs) == 0 && slices.Contains(free, method) {
		return nil
	}
	if len(runs) == 0 || slices.ContainsFunc(runs, func(run string) bool { return run != claims.Run }) {
		return ErrRole.With("run", claims.Run).WithMessage("the credential of a worker of %s does not permit a request about another run", claims.Run)
	}
	return nil
}
