package eval

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/command/serve"
	"github.com/rollout-rl/rollout/cmd/internal/evaluation"
	"github.com/rollout-rl/rollout/cmd/internal/inference"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/infer"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// library is what the worker and the process of a library get (rollout.suites.types.Request).
type library struct {
	Kind        string          `json:"kind"`
	Tasks       []string        `json:"tasks"`
	Args        json.RawMessage `json:"args"`
	NumFewshot  *uint32         `json:"num_fewshot"`
	Samples     uint32          `json:"samples"`
	Temperature *float64        `json:"temperature"`
	MaxTokens   *uint32         `json:"max_tokens"`
	Seed        *uint64         `json:"seed"`
	Python      string          `json:"python"`
	Concurrent  uint32          `json:"concurrent"`
	URL         string          `json:"url"` // "": the worker says which weights the model has
	Key         string          `json:"key"`
	Model       string          `json:"model"`
	Context     uint32          `json:"context"`
}

// library evaluates a suite whose tasks are those of a library, which sends their prompts to the
// endpoint of the local daemon.
func (e *evaluating) library(ctx context.Context, name string, s *configv1.EvalSuiteConfig, config *configv1.RunConfig, older *evaluation.Result) (infer.Event, error) {
	python, err := e.python(s)
	if err != nil {
		return infer.Event{}, err
	}
	served, err := e.served(s)
	if err != nil {
		return infer.Event{}, err
	}
	asked := &library{
		Kind: s.GetKind(), Tasks: s.GetTasks(), Args: json.RawMessage(cmp.Or(s.GetArgs(), "{}")), NumFewshot: s.NumFewshot, Samples: max(1, s.GetSamples()),
		Temperature: s.Temperature, MaxTokens: s.MaxTokens, Seed: s.Seed, Python: python, Concurrent: served.GetEngine().GetSlots(),
	}
	job, err := e.bareJob(name, s, config)
	if err != nil {
		return infer.Event{}, err
	}
	job.Library = asked
	end, err := e.sample(ctx, job, older)
	if err != nil || end.Event != infer.Ready {
		return end, err
	}
	random := make([]byte, 4)
	_, _ = rand.Read(random) // never fails
	model := "eval-" + strings.ReplaceAll(name, "_", "-") + "-" + hex.EncodeToString(random)
	err = e.env.Plane.With(e.cmd, func(_ context.Context, c *client.Client) error {
		at, stop, err := serve.Open(ctx, e.env, c, served, cmp.Or(end.Model, e.model), e.baseDir, model)
		if err != nil {
			return err
		}
		defer stop()
		asked.URL, asked.Key, asked.Model, asked.Context = at.URL, at.Key, at.Name, at.Context
		job.WeightsDigest, job.Model = end.ModelDigest, cmp.Or(end.Model, e.model)
		end, err = e.sample(ctx, job, older)
		return err
	})
	return end, err
}

// served is the configuration with which the model is served.
func (e *evaluating) served(s *configv1.EvalSuiteConfig) (*configv1.RunConfig, error) {
	config, problems, err := inference.ReadConfig(&planv1.ConfigSource{})
	if err != nil {
		return nil, err
	}
	if len(problems) > 0 {
		return nil, inference.Refuse(e.env, problems)
	}
	proto.Merge(config.GetEngine(), e.config.GetEngine())
	proto.Merge(config.GetSampling(), e.config.GetSampling())
	proto.Merge(config.GetModel(), e.config.GetModel())
	if s.MaxTokens != nil {
		config.Sampling.MaxTokens = s.MaxTokens
	}
	return config, nil
}

// python is the interpreter with the library.
func (e *evaluating) python(s *configv1.EvalSuiteConfig) (string, error) {
	path := s.GetPython()
	if path == "" {
		state, err := e.env.Plane.StateDir()
		if err != nil {
			return "", err
		}
		path = filepath.Join(state, "plugins", s.GetKind(), "bin", "python")
	} else if !filepath.IsAbs(path) {
		path = filepath.Join(e.baseDir, path)
	}
	if _, err := os.Stat(path); err != nil {
		return "", &exit.Error{
			Code: exit.NoInput, Reason: "PACKAGE_MISSING", Fix: fmt.Sprintf("run `rollout plugin install %s`, or set `python` of the suite", s.GetKind()),
			Err: fmt.Errorf("no interpreter has the library %s: %s does not exist", s.GetKind(), path),
		}
	}
	return path, nil
}
