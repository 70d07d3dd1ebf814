package planner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/algorithm"
	planformat "github.com/rollout-rl/rollout/libs/plan"
	"github.com/rollout-rl/rollout/libs/reward"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/probe"
)

// mixed is the name of the rows of a mixture.
const mixed = "data.train_mix"

// unused is how long rows stay in the planner's folder of inputs without being in a plan that is
// made. A run has its own link to them.
const unused = 30 * 24 * time.Hour

// preparedRows are rows that the planner wrote to its folder of inputs.
type preparedRows struct {
	file    string
	sources []*planv1.Source
}

// fetched is a model of the hub.
type fetched struct{ folder, revision string }

// sourceCheck gets what is not a file of the user in the form that a run reads: rows of other
// formats, of the hub, and of mixtures, and models of the hub.
type sourceCheck struct {
	config   *configv1.RunConfig
	findings findings
	files    *files
	prober   *probe.Prober
	pinned   []*planv1.Input // of an older plan, whose commits of the hub are used again

	prepared map[string]preparedRows // by the key of the data
}

// fetch prepares rows and downloads models. It reports what Python refuses.
func (d *sourceCheck) fetch(ctx context.Context) error {
	var fields, models []string
	var request probe.Request
	defer func() {
		for _, data := range request.Data {
			_ = os.Remove(data.Output) // it has another name if it is used
		}
	}()
	for _, field := range append([]string{"data.train", "data.eval"}, suiteFields(d.config)...) {
		sources := d.sources(field)
		if len(sources) == 0 {
			continue
		}
		output, err := d.files.newRows()
		if err != nil {
			return err
		}
		fields = append(fields, field)
		request.Data = append(request.Data, probe.Data{
			BaseDir: d.files.baseDir, Output: output, Seed: d.config.GetSeed(), Until: d.config.GetData().GetMixUntil(), Sources: sources,
			Baseline: d.baseline(field),
		})
	}
	for field, path := range d.modelPaths() {
		if planformat.OnHub(d.files.baseDir, path) && d.findings.Readable(field) {
			models = append(models, field)
		}
	}
	slices.Sort(models)
	for _, field := range models {
		path := d.modelPaths()[field]
		request.Models = append(request.Models, probe.Model{Name: d.pinnedModel(path), Patterns: d.modelFiles()})
	}
	if len(fields)+len(models) == 0 {
		return nil
	}
	answer, err := d.prober.Ask(ctx, request)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil || len(answer.Data) != len(fields) || len(answer.Models) != len(models) {
		d.findings.problems.Add(probeProblem(cmpErr(err)))
		return nil
	}
	for i, field := range fields {
		if err := d.rowsAnswer(field, request.Data[i].Output, answer.Data[i]); err != nil {
			return err
		}
	}
	for i, field := range models {
		if err := d.modelAnswer(field, d.modelPaths()[field], answer.Models[i]); err != nil {
			return err
		}
	}
	return nil
}

func cmpErr(err error) error {
	if err == nil {
		return errors.New("its answer lacks a part")
	}
	return err
}

// sources are those of the rows of a key; none if the run reads the file of the user, or if it is
// absent.
func (d *sourceCheck) sources(field string) []probe.Source {
	data := d.config.GetData()
	if field == "data.train" && len(data.GetTrainMix()) > 0 {
		var out []probe.Source
		for _, name := range slices.Sorted(maps.Keys(data.GetTrainMix())) {
			mix := data.GetTrainMix()[name]
			source := d.source(mix.GetPath(), mix.GetSubset(), mix.GetSplit())
			source.Name, source.Weight, source.Rename = name, mix.Weight, renames(data, mix)
			out = append(out, source)
		}
		if !d.findings.Readable(mixed) {
			return nil
		}
		return out
	}
	path, subset, split := data.GetTrain(), data.GetSubset(), data.GetTrainSplit()
	name, ofSuite := suiteOf(field)
	compared := ofSuite && d.config.GetEval().GetSuites()[name].Baseline != nil
	if compared && !d.comparable(name) {
		return nil
	}
	if ofSuite {
		path, split = d.config.GetEval().GetSuites()[name].GetData(), data.GetEvalSplit()
		if repository(path) != repository(data.GetTrain()) {
			subset = ""
		}
	}
	if field == "data.eval" || compared && path == "" {
		path, split = data.GetEval(), data.GetEvalSplit()
		if repository(path) != repository(data.GetTrain()) {
			subset = ""
		}
		if data != nil && data.EvalSubset != nil {
			subset = data.GetEvalSubset()
		}
	}
	if !d.files.converted(path) && !compared || !d.findings.Readable(field) {
		return nil
	}
	return []probe.Source{d.source(path, subset, split)}
}

// comparable reports whether rows and baseline of a suite are there, and reports files that are
// not.
func (d *sourceCheck) comparable(name string) bool {
	s, field := d.config.GetEval().GetSuites()[name], suiteField(name)
	path := s.GetData()
	if path == "" {
		path = d.config.GetData().GetEval()
		if path == "" || !d.files.converted(path) && !isFile(d.files.resolve(path)) { // reported at `data.eval`
			return false
		}
	} else if !d.files.converted(path) && !d.files.exists(field, path, false) {
		return false
	}
	baseline := baselineField(name)
	return d.findings.Readable(baseline) && d.files.exists(baseline, s.GetBaseline(), false)
}

// baseline has the completions to compare with of the rows of a key; nil: none.
func (d *sourceCheck) baseline(field string) *probe.Baseline {
	name, _ := suiteOf(field)
	s := d.config.GetEval().GetSuites()[name]
	if s.GetBaseline() == "" {
		return nil
	}
	return &probe.Baseline{Path: s.GetBaseline(), Limit: s.GetLimit()}
}

func (d *sourceCheck) source(path, subset, split string) probe.Source {
	data := d.config.GetData()
	source := probe.Source{Path: path, Subset: subset, Split: split}
	for _, in := range d.pinned {
		for _, old := range in.GetSources() {
			if old.GetRevision() != "" && old.GetPath() == repository(path) && (path == repository(path) || in.GetPath() == path || in.GetPath() == mixed || in.GetRole() == planv1.InputRole_INPUT_ROLE_SUITE_DATA) {
				source.Revision = old.GetRevision()
			}
		}
	}
	if algorithm.Name(d.config) == "kto" {
		source.Booleans = []string{data.GetLabelField()}
	}
	if data.GetMarginField() != "" {
		source.Numbers = []string{data.GetMarginField()}
	}
	return source
}

// renames maps the fields of a source of a mixture to those of [data].
func renames(data *configv1.DataConfig, mix *configv1.DataSourceConfig) map[string]string {
	out := map[string]string{}
	for _, pair := range [][2]string{
		{mix.GetPromptField(), data.GetPromptField()}, {mix.GetAnswerField(), data.GetAnswerField()},
		{mix.GetChosenField(), data.GetChosenField()}, {mix.GetRejectedField(), data.GetRejectedField()},
		{mix.GetMarginField(), data.GetMarginField()}, {mix.GetCompletionField(), data.GetCompletionField()},
		{mix.GetLabelField(), data.GetLabelField()},
	} {
		if pair[0] != "" && pair[1] != "" && pair[0] != pair[1] {
			out[pair[0]] = pair[1]
		}
	}
	return out
}

// converted are the endings of files that Python converts; any other file is JSON Lines.
var converted = []string{".parquet", ".csv", ".tsv", ".arrow", ".feather", ".gz"}

// converted reports whether a path names rows that are not one JSON Lines file: Python reads them,
// or a data source makes them.
func (f *files) converted(path string) bool {
	if path == "" {
		return false
	}
	if planformat.IsPlugin(path) {
		return true
	}
	info, err := os.Stat(input.Resolve(f.baseDir, path))
	if err != nil {
		return strings.ContainsAny(path, "*?[") || planformat.OnHub(f.baseDir, path)
	}
	return info.IsDir() || slices.Contains(converted, filepath.Ext(path))
}

// repository is a name on the hub without its revision.
func repository(path string) string {
	name, _, _ := strings.Cut(path, "@")
	return name
}

// newRows makes an empty file in the folder of inputs, and removes old rows there.
func (f *files) newRows() (string, error) {
	folder := filepath.Dir(f.made.Rows(""))
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	entries, err := os.ReadDir(folder)
	if err != nil {
		return "", err
	}
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && time.Since(info.ModTime()) > unused {
			_ = os.Remove(filepath.Join(folder, entry.Name()))
		}
	}
	rows, err := os.CreateTemp(folder, "new-*.tmp")
	if err != nil {
		return "", err
	}
	return rows.Name(), rows.Close()
}

// keepRows gives a new file its name in the folder of inputs.
func (f *files) keepRows(file string) (digest string, size int64, err error) {
	if digest, size, err = input.DigestFile(file); err != nil {
		return "", 0, err
	}
	if err := os.Chmod(file, 0o444); err != nil {
		return "", 0, err
	}
	return digest, size, os.Rename(file, f.made.Rows(digest))
}

func (d *sourceCheck) rowsAnswer(field, output string, answer probe.DataAnswer) error {
	if answer.Error != nil {
		switch name, ofSuite := suiteOf(field); {
		case ofSuite && answer.Source == probe.BaselineSource:
			field = baselineField(name)
		case answer.Source != "":
			field = mixed + "." + answer.Source + ".path"
		}
		d.findings.problems.Add(d.files.pythonProblem(answer.Error, field))
		return nil
	}
	digest, _, err := d.files.keepRows(output)
	if err != nil {
		return err
	}
	d.files.install(answer.Plugins)
	rows := preparedRows{file: d.files.made.Rows(digest)}
	for _, from := range answer.Sources {
		source := &planv1.Source{
			Name: from.Name, Path: filepath.ToSlash(from.Path), Revision: from.Revision, Subset: from.Subset, Split: from.Split,
			Rows: from.Rows, Taken: from.Taken,
		}
		for _, file := range from.Files {
			digest, size, err := input.DigestFile(file)
			if err != nil {
				return err
			}
			source.Files = append(source.Files, &planv1.SourceFile{
				Path: input.Relative(d.files.baseDir, file, from.Path), Digest: digest, Bytes: uint64(size),
			})
		}
		rows.sources = append(rows.sources, source)
	}
	d.prepared[field] = rows
	return nil
}

// modelPaths are the folders of models in the configuration, by their keys.
func (d *sourceCheck) modelPaths() map[string]string {
	out := map[string]string{
		"model.path":                     d.config.GetModel().GetPath(),
		"algorithm.distillation.teacher": d.config.GetAlgorithm().GetDistillation().GetTeacher(),
	}
	for _, part := range reward.Parts(d.config) {
		if part.Model != nil {
			out[part.Field+".model.path"] = part.Model.GetPath()
		}
	}
	return out
}

// pinnedModel is the name of a model with the commit of an older plan.
func (d *sourceCheck) pinnedModel(path string) string {
	for _, in := range d.pinned {
		if in.GetRevision() != "" && planformat.ModelOf(in) == path {
			return repository(path) + "@" + in.GetRevision()
		}
	}
	return path
}

// modelFiles are the patterns of the files of a model that are downloaded. A run whose policy acts
// for many steps has no other model.
func (d *sourceCheck) modelFiles() []string {
	if d.config.GetMultistep() != nil {
		return input.PolicyFiles
	}
	return input.ModelFiles
}

// modelAnswer links the folder of a model in the cache of Hugging Face into the folder of inputs.
func (d *sourceCheck) modelAnswer(field, path string, answer probe.ModelAnswer) error {
	if answer.Error != nil {
		d.findings.problems.Add(d.files.pythonProblem(answer.Error, field))
		d.files.models[path] = fetched{}
		return nil
	}
	link := d.files.made.Model(path, answer.Revision)
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return err
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace the link to the model %s: %w", path, err)
	}
	if err := os.Symlink(answer.Folder, link); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	d.files.models[path] = fetched{folder: link, revision: answer.Revision}
	return nil
}
