package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/proto/gen/names"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

// syncKeys reads the API keys from a gateway, which this process or another one hosts.
func (m *mesh) syncKeys(ctx context.Context, req *keyv1.SyncApiKeysRequest) (*keyv1.SyncApiKeysResponse, error) {
	keys, err := client(m, names.GatewayService, keyv1.NewApiKeyInternalServiceClient)
	if err != nil {
		return nil, err
	}
	return keys.SyncApiKeys(ctx, req)
}

// projectOf asks the scheduler for the project of a run.
func (m *mesh) projectOf(ctx context.Context, run string) (string, error) {
	runs, err := client(m, names.SchedulerService, runv1.NewSchedulerInternalServiceClient)
	if err != nil {
		return "", err
	}
	found, err := runs.GetProject(apikey.With(ctx, nil), &runv1.GetProjectRequest{RunId: run})
	return found.GetProject(), err
}

// standingOf asks the scheduler which credentials of workers of a run are in force.
func (m *mesh) standingOf(ctx context.Context, run string) (credential.Standing, error) {
	runs, err := client(m, names.SchedulerService, runv1.NewSchedulerInternalServiceClient)
	if err != nil {
		return credential.Standing{}, err
	}
	found, err := runs.GetStanding(apikey.With(ctx, nil), &runv1.GetStandingRequest{RunId: run})
	return credential.Standing{Incarnation: found.GetIncarnation(), Ended: found.GetEnded()}, err
}

// importKeys stores the keys of the files api-keys.json in folders, in which earlier versions kept
// them, and renames the files to api-keys.json.imported.
func importKeys(ctx context.Context, store gateway.KeyStore, log *slog.Logger, folders ...string) error {
	for _, folder := range folders {
		if folder == "" {
			continue
		}
		path := filepath.Join(folder, "api-keys.json")
		found, err := apikey.ReadFile(path)
		if err != nil {
			return err
		}
		if len(found) == 0 {
			continue
		}
		added, err := store.AddKeys(ctx, found)
		if err != nil {
			return err
		}
		if err := os.Rename(path, path+".imported"); err != nil {
			return fmt.Errorf("set the imported file of API keys aside: %w", err)
		}
		log.InfoContext(ctx, "API keys are stored in the database now", "keys", added, "file", path+".imported")
	}
	return nil
}
