package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"time"

	workers "github.com/rollout-rl/rollout/libs/worker"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

const (
	renewEvery = time.Second
	lookEvery  = 5 // renewals between two looks for a newer incarnation
)

// registration is a worker's entry in the registry, as rollout_workers/worker/registration.py keeps
// it.
type registration struct {
	spec    *runv1.WorkerSpec
	pid     string
	address string
	log     *slog.Logger
	client  *http.Client
}

// keep registers and renews until ctx ends, whatever the registry answers.
func (r registration) keep(ctx context.Context) {
	r.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1}, Timeout: 10 * time.Second}
	defer r.client.CloseIdleConnections()
	host, port := hostPort(r.address)
	id := r.spec.GetRunId() + "/" + r.spec.GetWorkerId()
	check := "service:" + id
	body := map[string]any{
		"ID": id, "Name": names.WorkerService(r.spec.GetKind()), "Address": host, "Port": port,
		"Meta": map[string]string{
			workers.MetaRun: r.spec.GetRunId(), workers.MetaWorker: r.spec.GetWorkerId(), workers.MetaIncarnation: fmt.Sprint(r.spec.GetIncarnation()),
			workers.MetaRank: "0", workers.MetaProof: workers.Proof(r.spec.GetNonce(), r.spec.GetWorkerId(), 0, r.address),
			"process": "process-" + r.pid, workers.MetaPID: r.pid,
		},
		"Check": map[string]string{"CheckID": check, "TTL": "3s", "Status": "passing", "DeregisterCriticalServiceAfter": "30s"},
	}
	beat := time.NewTicker(renewEvery)
	defer beat.Stop()
	registered := false
	for beats := 0; ; beats++ {
		var err error
		switch {
		case !registered:
			err = r.send(ctx, http.MethodPut, "/v1/agent/service/register?replace-existing-checks=true", body)
			registered = err == nil
		case beats%lookEvery == 0:
			err = r.send(ctx, http.MethodGet, "/v1/health/service/learner-worker?passing=true", nil)
			fallthrough
		default:
			err = errors.Join(err, r.send(ctx, http.MethodPut, "/v1/agent/check/pass/"+url.PathEscape(check), nil))
		}
		if err != nil && ctx.Err() == nil {
			r.log.Warn("registry; retrying", "error", err)
			registered = false // it may have been forgotten
		}
		select {
		case <-ctx.Done():
			return
		case <-beat.C:
		}
	}
}

func (r registration) send(ctx context.Context, method, path string, body any) error {
	var content bytes.Buffer
	if body != nil {
		if err := json.NewEncoder(&content).Encode(body); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+r.spec.GetConsulAddress()+path, &content)
	if err != nil {
		return err
	}
	req.Header.Set("X-Consul-Token", r.spec.GetConsulToken())
	resp, err := r.client.Do(req)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s: HTTP %d", method, path, resp.StatusCode)
	}
	return err
}
