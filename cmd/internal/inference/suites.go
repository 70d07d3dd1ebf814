package inference

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/problem"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/planner/config"
)

// Suites is a file with suites. It may be a configuration of a run, or have only the tables that an
// evaluation needs.
type Suites struct {
	Config   *configv1.RunConfig
	Problems []*planv1.Problem // of the keys that an evaluation reads

	reading *config.Reading
}

// ReadSuites reads the suites of a file.
func ReadSuites(source *planv1.ConfigSource) (*Suites, error) {
	reader, err := config.NewReader()
	if err != nil {
		return nil, err
	}
	reading := reader.Read(source)
	s := &Suites{Config: reading.Config, reading: reading}
	for _, p := range reading.Sorted() {
		if evaluates(p) {
			s.Problems = append(s.Problems, p)
		}
	}
	if s.Config.Data == nil {
		s.Config.Data = &configv1.DataConfig{}
	}
	if s.Config.Model == nil {
		s.Config.Model = &configv1.ModelConfig{}
	}
	s.Config = reader.Again(s.Config).Config // with the defaults of those tables
	return s, nil
}

// evaluates reports whether a problem concerns an evaluation: not one of a key that only a run
// needs.
func evaluates(p *planv1.Problem) bool {
	field := p.GetField()
	if strings.HasPrefix(field, "eval.suites") || field == "" && p.GetReason() != "CONFLICT" {
		return true
	}
	return p.GetReason() != "MISSING_KEY" && p.GetReason() != "CONFLICT"
}

// Complete takes the settings that the file lacks from a run.
func (s *Suites) Complete(run *runv1.Run) {
	from, to := run.GetPlan().GetConfig(), s.Config
	lacks := func(key string) bool { return !s.reading.Wrote(key) }
	if lacks("sampling") {
		to.Sampling = from.GetSampling()
	}
	if lacks("engine") {
		to.Engine = from.GetEngine()
		if python := to.GetEngine().GetPython(); python != "" && !filepath.IsAbs(python) {
			*to.Engine.Python = filepath.Join(run.GetBaseDir(), python)
		}
	}
	if lacks("model.chat_template") {
		to.Model.ChatTemplate = from.GetModel().ChatTemplate
	}
	if lacks("model.chat_family") {
		to.Model.ChatFamily = from.GetModel().ChatFamily
	}
	if lacks("model.dtype") {
		to.Model.Dtype = from.GetModel().Dtype
	}
	if lacks("data.prompt_field") {
		to.Data.PromptField = from.GetData().PromptField
	}
	if lacks("data.overlong") {
		to.Data.Overlong = from.GetData().Overlong
	}
}

// Refuse prints problems and returns their error.
func Refuse(env *cli.Env, problems []*planv1.Problem) error {
	fmt.Fprint(env.Stderr, problem.Render(problems, env.ErrStyle()))
	return problem.Exit(problems)
}
