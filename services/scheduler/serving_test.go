package scheduler_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// serving is the stream of one ServeModel call.
type serving struct {
	grpc.ServerStream
	ctx    context.Context
	states chan *servingv1.Serving
	ended  chan error // the error of the call
	cancel context.CancelFunc
}

func (s *serving) Context() context.Context { return s.ctx }

func (s *serving) Send(r *servingv1.ServeModelResponse) error {
	select {
	case s.states <- r.GetServing():
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

// serve begins to serve the model in a folder with two workers.
func (w *world) serve(folder, name string, detached bool) *serving {
	config := plan(1, "sync", 0, false).GetConfig()
	config.Name, config.Engine.Workers = proto.String(name), proto.Uint32(2)
	config.Model = servedModel(folder)
	config.Weights = &configv1.WeightsConfig{Update: proto.String("atomic")}
	s := &serving{states: make(chan *servingv1.Serving), ended: make(chan error, 1)}
	s.ctx, s.cancel = context.WithCancel(w.t.Context())
	go func() {
		s.ended <- w.generation.serving.ServeModel(&servingv1.ServeModelRequest{Config: config, BaseDir: w.dir, WeightsVersion: 7, Detached: detached}, s)
	}()
	return s
}

// until returns the first state that is as wanted.
func (s *serving) until(t *testing.T, state servingv1.ServingState, ready uint32) *servingv1.Serving {
	t.Helper()
	for {
		select {
		case got := <-s.states:
			if got.GetState() == state && got.GetReadyWorkers() == ready {
				return got
			}
		case err := <-s.ended:
			t.Fatalf("the call ended: %v", err)
		case <-t.Context().Done():
			t.Fatal("the state was not reached")
		}
	}
}

// end reads the rest of the stream and returns the error of the call.
func (s *serving) end() error {
	for {
		select {
		case <-s.states:
		case err := <-s.ended:
			return err
		}
	}
}

func (w *world) servings() []*servingv1.Serving {
	w.t.Helper()
	list, err := w.generation.serving.ListServings(w.t.Context(), &servingv1.ListServingsRequest{})
	if err != nil {
		w.t.Fatal(err)
	}
	return list.GetServings()
}

// modelFolder makes a folder with the files that every model has.
func (w *world) modelFolder(files ...string) string {
	w.t.Helper()
	folder := filepath.Join(w.t.TempDir(), "model")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		w.t.Fatal(err)
	}
	for _, name := range files {
		if err := os.WriteFile(filepath.Join(folder, name), []byte("{}"), 0o600); err != nil {
			w.t.Fatal(err)
		}
	}
	return folder
}

const serves = servingv1.ServingState_SERVING_STATE_SERVING

func TestServedModelEndsWithItsCall(t *testing.T) {
	t.Parallel()
	w := setup(t)
	g := w.start()
	folder := w.modelFolder("config.json", "tokenizer.json")
	s := w.serve(folder, "tiny", false)
	state := s.until(t, serves, 2)
	if state.GetModel() != folder || state.GetWeightsVersion() != 7 || state.GetWorkers() != 2 || !strings.HasPrefix(state.GetServingId(), "serve-") {
		t.Errorf("%v", state)
	}
	spec := w.launcher.spec("inference-0", 0)
	config := spec.GetPlan().GetConfig()
	if spec.GetKind() != "inference" || spec.GetInitialWeights() != folder || spec.GetInitialVersion() != 7 || config.GetEnvironment().GetKind() != "external" || config.GetReward() != nil {
		t.Errorf("%v", spec)
	}
	if update := config.GetWeights().GetUpdate(); update != "in_flight" {
		t.Errorf("the workers update their weights %q: no controller would resume them", update)
	}
	request := &runv1.VerifyWorkersRequest{RunId: state.GetServingId(), Incarnation: 1}
	for _, p := range w.launcher.processes() {
		request.Workers = append(request.Workers, &runv1.WorkerRegistration{WorkerId: p.spec.GetWorkerId(), Address: "host:" + strings.TrimPrefix(p.ID(), "process-"), Proof: p.proof})
	}
	request.Workers = append(request.Workers, &runv1.WorkerRegistration{WorkerId: "inference-0", Address: "host:1", Proof: "forged"})
	verified, err := g.internal.VerifyWorkers(t.Context(), request)
	if err != nil || !slices.Equal(verified.GetAccepted(), []bool{true, true, false}) {
		t.Errorf("%v %v", verified, err)
	}
	if err := w.serve(folder, "tiny", false).end(); rpcerr.Reason(err) != "SERVING_NAME_TAKEN" {
		t.Errorf("%v", err)
	}
	s.cancel()
	if err := s.end(); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	left, _ := filepath.Glob(filepath.Join(w.dir, "serve", "*"))
	if p, list := w.launcher.processes(), w.servings(); len(p) > 0 || len(list) > 0 || left != nil {
		t.Errorf("left are %d processes, %v, %v", len(p), list, left)
	}
}

func TestDetachedModelIsServedUntilItIsStopped(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	folder := w.modelFolder("config.json", "tokenizer.json")
	s := w.serve(folder, "tiny", true)
	s.until(t, serves, 2)
	s.cancel()
	_ = s.end()
	if list := w.servings(); len(list) != 1 || list[0].GetState() != serves || !list[0].GetDetached() {
		t.Fatalf("%v", list)
	}
	watching := w.serve(folder, "other", false)
	watching.until(t, serves, 2)
	for _, name := range []string{"tiny", "other"} {
		stopped := make(chan error, 1)
		go func() {
			_, err := w.generation.serving.StopServing(t.Context(), &servingv1.StopServingRequest{ServingId: name})
			stopped <- err
		}()
		if name == "other" {
			if err := watching.end(); err != nil {
				t.Errorf("%v", err)
			}
		}
		if err := <-stopped; err != nil {
			t.Errorf("%v", err)
		}
	}
	if p := w.launcher.processes(); len(p) > 0 {
		t.Errorf("left are %d processes", len(p))
	}
	_, err := w.generation.serving.StopServing(t.Context(), &servingv1.StopServingRequest{ServingId: "tiny"})
	if rpcerr.Reason(err) != "SERVING_NOT_FOUND" {
		t.Errorf("%v", err)
	}
}

// A worker that cannot work with the model ends the call with its last lines. A detached model
// stays in the list with the reason.
func TestServedModelFails(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	folder := w.modelFolder("config.json", "tokenizer.json")
	refuse := launch.Exit{Code: launch.RefusedCode, LastLines: []string{"no such layer"}}
	detached := w.serve(folder, "detached", true)
	detached.until(t, serves, 2)
	detached.cancel()
	_ = detached.end()
	w.launcher.crash("inference-0", refuse)
	for list := w.servings(); list[0].GetState() != servingv1.ServingState_SERVING_STATE_FAILED || !strings.Contains(list[0].GetMessage(), "no such layer"); list = w.servings() {
		if t.Context().Err() != nil {
			t.Fatalf("%v", list)
		}
		runtime.Gosched()
	}
	s := w.serve(folder, "detached", false) // the name is free again
	s.until(t, serves, 2)
	w.launcher.crash("inference-1", refuse)
	if err := s.end(); rpcerr.Reason(err) != "SERVING_FAILED" || !strings.Contains(rpcerr.Text(err), "no such layer") {
		t.Errorf("%v", err)
	}
	if p := w.launcher.processes(); len(p) > 0 {
		t.Errorf("left are %d processes", len(p))
	}
}

func TestFoldersThatCannotBeServed(t *testing.T) {
	t.Parallel()
	w := setup(t)
	w.start()
	for reason, folder := range map[string]string{
		"MODEL_FOLDER_MISSING": filepath.Join(w.dir, "missing"), "MODEL_FOLDER_INVALID": w.modelFolder("config.json"),
	} {
		if err := w.serve(folder, "tiny", false).end(); rpcerr.Reason(err) != reason || !strings.Contains(rpcerr.Text(err), folder) {
			t.Errorf("%v, want %s", err, reason)
		}
	}
}

func servedModel(folder string) *configv1.ModelConfig {
	return &configv1.ModelConfig{Path: proto.String(folder)}
}
