// Package evaluation computes, stores, shows, and compares the results of `rollout eval`.
package evaluation

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/inference"
	"github.com/rollout-rl/rollout/libs/atomicfile"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/infer"
	"github.com/rollout-rl/rollout/libs/suite"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

const (
	format   = 2 // of results
	scores   = 1 // the format of the scores that a worker writes
	fileName = "results.json"
)

// Result is the content of `results.json`: an evaluation of a model.
type Result struct {
	Format int      `json:"format"`
	Model  string   `json:"model"` // as the user named it
	Digest string   `json:"model_digest"`
	Suites []*Suite `json:"suites"`
}

// Suite is the result of one suite.
type Suite struct {
	Name       string             `json:"name"`
	Data       string             `json:"data"`
	DataDigest string             `json:"data_digest"`
	Rows       int                `json:"rows"`
	Dropped    int                `json:"dropped"` // rows that are too long
	Samples    int                `json:"samples"`
	Tokens     int                `json:"tokens"`
	Failures   map[string]uint64  `json:"failures"` // samples without a score, by reason
	PassScore  float64            `json:"pass_score"`
	Sampling   inference.Sampling `json:"sampling"`
	Metrics    []suite.Value      `json:"metrics"`
	File       string             `json:"file"`              // every sample
	Kind       string             `json:"kind,omitempty"`    // of a library, whose metrics these are
	Version    string             `json:"version,omitempty"` // of the library

	rows []line
}

// line is one line of the scores that the worker writes.
type line struct {
	Row         int                  `json:"row"`
	Scores      []*float64           `json:"scores"`
	Parts       map[string][]float64 `json:"parts"`
	Cluster     string               `json:"cluster"`
	Prompt      string               `json:"prompt"`
	Completions []string             `json:"completions"`
}

// Samples is the file of a suite with every sample, in the folder of a result.
func Samples(name string) string { return name + ".parquet" }

// Scores is the file with the scores of the rows.
func Scores(name string) string { return name + ".scores.jsonl" }

// Measure computes the metrics of a suite from the scores in folder.
func Measure(folder, name string, s *configv1.EvalSuiteConfig, config *configv1.RunConfig, end infer.Event) (*Suite, error) {
	digest, rows, err := readScores(filepath.Join(folder, Scores(name)))
	if err != nil {
		return nil, err
	}
	out := &Suite{
		Name: name, Data: config.GetData().GetEval(), DataDigest: digest, Rows: end.Rows, Dropped: end.Dropped, Samples: end.Samples, Tokens: end.Tokens,
		Failures: end.Failures, PassScore: s.GetPassScore(), Sampling: inference.SamplingOf(config), Metrics: []suite.Value{}, File: Samples(name), rows: rows,
	}
	if suite.OfLibrary(s) {
		out.Kind, out.Version, out.Data = s.GetKind(), end.Version, strings.Join(s.GetTasks(), ", ")
		for _, m := range end.Metrics {
			out.Metrics = append(out.Metrics, suite.Measured(m.Name, m.Value, m.Stderr, m.Samples))
		}
		return out, nil
	}
	metrics, err := suite.ParseAll(suite.MetricsOf(s), int(max(1, s.GetSamples())), s.Baseline != nil)
	if err != nil {
		return nil, err
	}
	for _, metric := range metrics {
		if value, ok := metric.Compute(scored(rows), out.PassScore); ok {
			out.Metrics = append(out.Metrics, value)
		}
	}
	for _, part := range parts(rows) {
		value, ok := suite.Metric{Kind: suite.Mean}.Compute(ofPart(rows, part), out.PassScore)
		if value.Metric, value.Part = part, true; ok {
			out.Metrics = append(out.Metrics, value)
		}
	}
	return out, nil
}

// scored returns the scores of the samples that have one.
func scored(lines []line) []suite.Row {
	rows := make([]suite.Row, len(lines))
	for i, l := range lines {
		rows[i] = suite.Row{Row: l.Row, Cluster: l.Cluster}
		for _, score := range l.Scores {
			if score != nil {
				rows[i].Scores = append(rows[i].Scores, *score)
			}
		}
	}
	return rows
}

// parts returns the names of the further numbers of a reward.
func parts(lines []line) []string {
	var names []string
	for _, l := range lines {
		for name := range l.Parts {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}

func ofPart(lines []line, name string) []suite.Row {
	var rows []suite.Row
	for _, l := range lines {
		rows = append(rows, suite.Row{Row: l.Row, Scores: l.Parts[name], Cluster: l.Cluster})
	}
	return rows
}

// readScores reads the file of a worker and returns the digest of the data with the rows.
func readScores(path string) (digest string, rows []line, err error) {
	damaged := func(err error) error {
		return exit.New(exit.Data, "evaluate again with --restart", "%s is not a file of scores: %w", path, err)
	}
	file, err := os.Open(path)
	if err != nil {
		return "", nil, exit.New(exit.NoInput, "evaluate again", "cannot read the scores: %w", err)
	}
	defer func() { _ = file.Close() }()
	reader := bufio.NewReader(file)
	var head struct {
		Format int `json:"rollout_scores"`
		Inputs struct{ Data string }
	}
	for number := 0; ; number++ {
		text, err := reader.ReadBytes('\n')
		if errors.Is(err, io.EOF) && len(text) == 0 {
			break
		}
		if err != nil {
			return "", nil, damaged(err)
		}
		if number == 0 {
			err = json.Unmarshal(text, &head)
		} else {
			rows = append(rows, line{})
			err = json.Unmarshal(text, &rows[number-1])
		}
		if err != nil {
			return "", nil, damaged(err)
		}
	}
	if head.Format != scores {
		return "", nil, damaged(errors.New("it has another format"))
	}
	return head.Inputs.Data, rows, nil
}

// Write writes a result into its folder: `results.json` and `index.html`.
func (r *Result) Write(folder string) error {
	r.Format = format
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	var page strings.Builder
	if err := r.html(&page); err != nil {
		return err
	}
	for name, content := range map[string]string{fileName: string(text) + "\n", "index.html": page.String()} {
		if err := atomicfile.Write(filepath.Join(folder, name), []byte(content), 0o644); err != nil {
			return exit.New(exit.CannotMake, "name another folder with --output", "cannot write the results: %w", err)
		}
	}
	return nil
}

// Exists reports whether a folder has a result.
func Exists(folder string) bool {
	info, err := os.Stat(filepath.Join(folder, fileName))
	return err == nil && info.Mode().IsRegular()
}

// Begun reports whether a folder has a result, or what an evaluation that has not ended has
// written.
func Begun(folder string) bool {
	for _, pattern := range []string{Scores("*"), Samples("*") + ".journal"} {
		if found, _ := filepath.Glob(filepath.Join(folder, pattern)); len(found) > 0 {
			return true
		}
	}
	return Exists(folder)
}

// Read reads the result in a folder.
func Read(folder string) (*Result, error) {
	path := filepath.Join(folder, fileName)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && Begun(folder) {
		return nil, exit.New(exit.NoInput, "repeat its command, which continues", "the evaluation in %s has not ended: it has no %s", folder, fileName)
	}
	if err != nil {
		return nil, exit.New(exit.NoInput, "name a folder that `rollout eval` has written", "cannot read the results: %w", err)
	}
	var r Result
	if err := json.Unmarshal(text, &r); err != nil || r.Format != format {
		return nil, exit.New(exit.Data, "evaluate again with this version", "%s is not a result of this version", path)
	}
	for _, s := range r.Suites {
		if _, s.rows, err = readScores(filepath.Join(folder, Scores(s.Name))); err != nil {
			return nil, err
		}
	}
	return &r, nil
}

// Keep adds the suites of an older result in folder that this one does not have. Both must be of
// the same weights.
func (r *Result) Keep(older *Result, folder string) error {
	if err := older.Of(r.Digest, folder); err != nil {
		return err
	}
	for _, s := range older.Suites {
		if r.suite(s.Name) == nil {
			r.Suites = append(r.Suites, s)
		}
	}
	slices.SortFunc(r.Suites, func(a, b *Suite) int { return strings.Compare(a.Name, b.Name) })
	return nil
}

// Of returns an error if a result in folder is of other weights.
func (r *Result) Of(digest, folder string) error {
	if r.Digest == digest {
		return nil
	}
	return refused("EVAL_MODELS_DIFFER", "name another folder with --output, or evaluate every suite: leave --only out and add --restart",
		"the results in %s are of a model with other weights: %s has the digest %s, and this model %s", folder, r.Model, r.Digest, digest)
}

// suite returns a suite by its name; nil without one.
func (r *Result) suite(name string) *Suite {
	if i := slices.IndexFunc(r.Suites, func(s *Suite) bool { return s.Name == name }); i >= 0 {
		return r.Suites[i]
	}
	return nil
}
