package planner

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/suite"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	"github.com/rollout-rl/rollout/services/planner/input"
	"github.com/rollout-rl/rollout/services/planner/problem"
)

// dataCheck reads the datasets.
type dataCheck struct {
	config   *configv1.RunConfig
	findings findings
	files    *files

	train, eval *input.Dataset            // nil without a usable dataset
	suites      map[string]*input.Dataset // usable ones that evaluations of the run read, by suite; also that of `data.eval`
	first       *input.Dataset            // of the rows that the reward scores, even if other rows have problems
	pinned      map[*input.Dataset]*planv1.Input
}

// read reads the rows of both keys. prepared are those that are not in a file of the user, by key.
func (d *dataCheck) read(prepared map[string]preparedRows) error {
	data := d.config.GetData()
	train := data.GetTrain()
	if len(data.GetTrainMix()) > 0 {
		train = mixed
	}
	var err error
	if d.train, err = d.dataset("data.train", train, prepared, planv1.InputRole_INPUT_ROLE_TRAIN_DATA); err != nil {
		return err
	}
	if d.eval, err = d.dataset("data.eval", data.GetEval(), prepared, planv1.InputRole_INPUT_ROLE_EVAL_DATA); err != nil {
		return err
	}
	d.heldOut()
	return d.readSuites(prepared)
}

// readSuites reads the rows of the suites that the run evaluates. Suites of one file share it.
func (d *dataCheck) readSuites(prepared map[string]preparedRows) error {
	d.suites = map[string]*input.Dataset{}
	read := map[string]*input.Dataset{}
	for _, name := range suite.InRun(d.config) {
		path, compared := d.config.GetEval().GetSuites()[name].GetData(), d.config.GetEval().GetSuites()[name].Baseline != nil
		data, known := read[path]
		switch {
		case compared:
			var err error
			if data, err = d.comparedRows(name, prepared); err != nil {
				return err
			}
		case path == "":
			data = d.eval
		case !known:
			var err error
			if data, err = d.dataset(suiteField(name), path, prepared, planv1.InputRole_INPUT_ROLE_SUITE_DATA); err != nil {
				return err
			}
			read[path] = data
		}
		if data == nil {
			continue
		}
		d.suites[name] = data
		if field := d.config.GetEval().GetSuites()[name].GetCluster(); field != "" {
			d.clustered(name, field, data)
		}
	}
	return nil
}

// comparedRows reads the rows of a suite with the completions of its baseline; nil if they could
// not be prepared, which was reported. In the plan they have the name of the key of the baseline.
func (d *dataCheck) comparedRows(name string, prepared map[string]preparedRows) (*input.Dataset, error) {
	field := suiteField(name)
	if _, made := prepared[field]; !made {
		return nil, nil
	}
	path := cmp.Or(d.config.GetEval().GetSuites()[name].GetData(), d.config.GetData().GetEval())
	data, err := d.dataset(field, path, prepared, planv1.InputRole_INPUT_ROLE_SUITE_DATA)
	if data != nil {
		d.pinned[data].Path = baselineField(name)
	}
	return data, err
}

// clustered reports a suite whose first rows lack the field of related rows.
func (d *dataCheck) clustered(name, field string, data *input.Dataset) {
	for i, row := range data.First {
		var fields map[string]json.RawMessage
		if json.Unmarshal(row.JSON, &fields) == nil && fields[field] == nil {
			key := "eval.suites." + name + ".cluster"
			d.findings.report(key, problem.BadRow, fmt.Sprintf("row %d of %s has no field `%s`", i+1, data.Path, field), "name a field that every row has, or remove `cluster`")
			return
		}
	}
}

// suiteField is the key of the rows of a suite.
func suiteField(name string) string { return "eval.suites." + name + ".data" }

// baselineField is the key of the completions to compare with, and the name of such rows in a plan.
func baselineField(name string) string { return "eval.suites." + name + ".baseline" }

// suiteOf is the suite whose rows a key sets.
func suiteOf(field string) (name string, found bool) {
	name, found = strings.CutPrefix(field, "eval.suites.")
	return strings.TrimSuffix(name, ".data"), found
}

// suiteFields are the keys of the rows of suites that the run evaluates, one for each path, and for
// each suite with a baseline.
func suiteFields(config *configv1.RunConfig) []string {
	var fields, paths []string
	for _, name := range suite.InRun(config) {
		s := config.GetEval().GetSuites()[name]
		switch path := s.GetData(); {
		case s.Baseline != nil:
			fields = append(fields, suiteField(name))
		case path != "" && !slices.Contains(paths, path):
			fields, paths = append(fields, suiteField(name)), append(paths, path)
		}
	}
	return fields
}

// maxTokens is the largest number of tokens of a completion of the rows.
func (d *dataCheck) maxTokens(data *input.Dataset) uint32 {
	most := uint32(0)
	if data == d.train || data == d.eval {
		most = d.config.GetSampling().GetMaxTokens()
	}
	for name, rows := range d.suites {
		if rows == data {
			most = max(most, suite.Config(d.config, name).GetSampling().GetMaxTokens())
		}
	}
	return most
}

// dataset reads the rows of a key; nil if it is not set, does not exist, or has problems.
func (d *dataCheck) dataset(field, path string, prepared map[string]preparedRows, role planv1.InputRole) (*input.Dataset, error) {
	rows, made := prepared[field]
	switch {
	case made:
	case path == "" || path == mixed || d.files.converted(path) || !d.files.exists(field, path, false): // reported already
		return nil, nil
	default:
		rows.file = d.files.resolve(path)
	}
	before := d.findings.problems.Len()
	data := &input.Dataset{
		File: rows.file, Path: path, PromptField: d.config.GetData().GetPromptField(),
		ReferenceField: d.config.GetData().GetAnswerField(), ChatTemplate: d.config.GetModel().GetChatTemplate(),
	}
	if algorithm.EnvironmentRewards(d.config) || !d.findings.Readable("environment.kind") {
		data.PromptField = "" // the environment reads the rows, or may do so
	}
	if d.taught(role) {
		data.AnswerField, data.Preference = d.answer(), d.preference()
	}
	data.Asked = role != planv1.InputRole_INPUT_ROLE_TRAIN_DATA && algorithm.FromData(d.config) && !d.taught(role)
	data.Repeats = slices.ContainsFunc(rows.sources, func(s *planv1.Source) bool { return s.GetTaken() > s.GetRows() })
	if len(rows.sources) == 1 && len(rows.sources[0].GetFiles()) == 1 {
		if file := rows.sources[0].GetFiles()[0].GetPath(); slices.Contains([]string{".csv", ".tsv"}, filepath.Ext(file)) {
			data.Table = input.Resolve(d.files.baseDir, file)
		}
	}
	if err := data.Read(d.findings.problems); err != nil {
		return nil, err
	}
	if role == d.scored() {
		d.first = data
	}
	if d.findings.problems.Len() > before {
		return nil, nil
	}
	d.labels(data)
	d.ties(data)
	d.duplicates(data)
	in := &planv1.Input{
		Role: role, Path: filepath.ToSlash(filepath.Clean(path)), Digest: data.Digest, Bytes: data.Bytes, Rows: data.Rows, Sources: rows.sources,
	}
	d.pinned[data] = in
	d.files.add(in)
	return data, nil
}

// truncated records how many rows of a dataset are cut.
func (d *dataCheck) truncated(data *input.Dataset, rows uint64) { d.pinned[data].Truncated = rows }

// drop leaves rows out of a dataset: the run reads a copy without them. Rows count from 0.
func (d *dataCheck) drop(data *input.Dataset, rows []uint64) error {
	file, err := d.files.newRows()
	if err != nil {
		return err
	}
	defer os.Remove(file) // it has another name if it is used
	if err := input.Drop(data.File, file, rows); err != nil {
		return err
	}
	digest, size, err := d.files.keepRows(file)
	if err != nil {
		return err
	}
	in := d.pinned[data]
	if len(in.GetSources()) == 0 {
		in.Sources = []*planv1.Source{{
			Path: in.GetPath(), Rows: data.Rows, Taken: data.Rows,
			Files: []*planv1.SourceFile{{Path: in.GetPath(), Digest: in.GetDigest(), Bytes: in.GetBytes()}},
		}}
	}
	data.Rows -= uint64(len(rows))
	in.Digest, in.Bytes, in.Rows, in.Dropped = digest, uint64(size), data.Rows, uint64(len(rows))
	return nil
}

// duplicates warns of prompts, or whole rows if they are trained on, that a dataset has several
// times.
func (d *dataCheck) duplicates(data *input.Dataset) {
	count, row, first := data.Duplicates()
	if count == 0 || data.Repeats {
		return
	}
	what, fix := "prompt", "remove them, unless these prompts are meant to be sampled more often"
	if len(data.Completions()) > 0 || data.PromptField == "" {
		what, fix = "row", "remove them, unless these rows are meant to count more"
	}
	message := fmt.Sprintf("%d rows repeat the %s of an earlier row; the first repeats line %d", count, what, first)
	if what == "row" {
		message = fmt.Sprintf("%d rows are equal to an earlier row; the first is equal to line %d", count, first)
	}
	if count == 1 {
		message = strings.Replace(strings.Replace(strings.Replace(message, "1 rows repeat", "1 row repeats", 1), "1 rows are", "1 row is", 1), "; the first repeats", ",", 1)
		message = strings.Replace(message, "; the first is equal to", ",", 1)
	}
	d.findings.warnings.Add(&planv1.Problem{
		Reason: problem.BadRow, File: data.Path, Line: uint32(row), Column: 1, Message: message, Fix: fix,
		Excerpt: input.Lines(data.File, []uint64{row})[row],
	})
}

// small warns if a step takes more rows than the training data has.
func (d *dataCheck) small() {
	const field = "train.groups_per_step"
	step := uint64(d.config.GetTrain().GetGroupsPerStep())
	if d.train == nil || d.train.Rows >= step {
		return
	}
	d.findings.warn(field, problem.BadRow,
		fmt.Sprintf("a step takes %d rows, but %s has %d: a step has the same row several times", step, d.train.Path, d.train.Rows),
		fmt.Sprintf("write `groups_per_step = %d` or less, or add rows", d.train.Rows))
}

// heldOut warns of held-out rows that are equal to the training rows.
func (d *dataCheck) heldOut() {
	if d.train == nil || d.eval == nil {
		return
	}
	const field = "data.eval"
	if d.train.Digest != d.eval.Digest {
		d.leaked(field)
		return
	}
	d.findings.warn(field, problem.BadRow,
		fmt.Sprintf("%s has the same rows as `data.train`: evaluations would measure memorization", d.config.GetData().GetEval()),
		"move some rows from `data.train` to another file and use it here")
}

// leaked warns of single held-out rows that the training rows have too.
func (d *dataCheck) leaked(field string) {
	count, row := d.eval.Shared(d.train)
	if count == 0 {
		return
	}
	what := "the prompt of a training row"
	if len(d.eval.Completions()) > 0 && len(d.train.Completions()) > 0 || d.eval.PromptField == "" {
		what = "a training row"
	}
	d.findings.warn(field, problem.BadRow,
		fmt.Sprintf("%d of the %d held-out rows repeat %s; the first is row %d: evaluations would partly measure memorization", count, d.eval.Rows, what, row),
		"remove these rows from `data.train` or from `data.eval`")
}

// ties warns of pairs of equal completions.
func (d *dataCheck) ties(data *input.Dataset) {
	if data.Ties == 0 {
		return
	}
	p := data.Preference
	if data.Ties == data.Rows {
		d.findings.problems.Add(&planv1.Problem{
			Reason: problem.BadRow, File: data.Path, Line: uint32(data.Tie), Column: 1, Excerpt: input.Lines(data.File, []uint64{data.Tie})[data.Tie],
			Message: fmt.Sprintf("`%s` and `%s` are equal in every pair, so the rows have no preference", p.Chosen, p.Rejected), Fix: "add pairs that differ",
		})
		return
	}
	d.findings.warnings.Add(&planv1.Problem{
		Reason: problem.BadRow, File: data.Path, Line: uint32(data.Tie), Column: 1,
		Message: fmt.Sprintf("`%s` and `%s` are equal in %d of %d pairs, of which this is the first: such a pair has no gradient", p.Chosen, p.Rejected, data.Ties, data.Rows),
		Fix:     "remove these rows: they take the place of others in a step",
	})
}

// labels warns if all labels are equal.
func (d *dataCheck) labels(data *input.Dataset) {
	if data.Preference.Label == "" || data.Desirable > 0 && data.Desirable < data.Rows {
		return
	}
	has, lacks := "desirable (true)", "undesirable (false)"
	if data.Desirable == 0 {
		has, lacks = lacks, has
	}
	d.findings.warnings.Add(&planv1.Problem{
		Reason: problem.BadRow, File: data.Path, Line: 1, Column: 1,
		Message: fmt.Sprintf("every completion is %s and none is %s, but KTO needs both", has, lacks),
		Fix:     fmt.Sprintf("add rows with the other value of `%s`, or use [algorithm.sft] if all are desirable", data.Preference.Label),
	})
}

// scored is the role of the rows whose completions the reward scores: the held-out ones if the
// algorithm trains on rows.
func (d *dataCheck) scored() planv1.InputRole {
	if algorithm.FromData(d.config) && d.config.GetData().GetEval() != "" {
		return planv1.InputRole_INPUT_ROLE_EVAL_DATA
	}
	return planv1.InputRole_INPUT_ROLE_TRAIN_DATA
}

// taught reports whether rows must contain training targets: training rows, and held-out rows whose
// loss is computed.
func (d *dataCheck) taught(role planv1.InputRole) bool {
	return role == planv1.InputRole_INPUT_ROLE_TRAIN_DATA || role == planv1.InputRole_INPUT_ROLE_EVAL_DATA && algorithm.TeachesHeldOut(d.config)
}

// answer is the field that the algorithm trains on; "" without one.
func (d *dataCheck) answer() string {
	if d.config.GetAlgorithm().GetSft() != nil {
		return d.config.GetData().GetAnswerField()
	}
	return ""
}

// preference has the fields that the algorithm needs in addition to the prompt.
func (d *dataCheck) preference() input.Preference {
	data, p := d.config.GetData(), input.Preference{Algorithm: algorithm.Name(d.config)}
	if algorithm.Pairs(d.config) {
		p.Chosen, p.Rejected = data.GetChosenField(), data.GetRejectedField()
		p.Others, p.OthersFix = [2]string{data.GetCompletionField(), data.GetLabelField()}, "use [algorithm.kto], which trains on labels"
	}
	if d.config.GetAlgorithm().GetRewardModel() != nil {
		p.Margin = data.GetMarginField()
	}
	if kto := d.config.GetAlgorithm().GetKto(); kto != nil && !kto.GetPaired() {
		p.Completion, p.Label = data.GetCompletionField(), data.GetLabelField()
		p.Others, p.OthersFix = [2]string{data.GetChosenField(), data.GetRejectedField()}, "write `paired = true` in [algorithm.kto]"
	}
	return p
}

// rows are those of one pass over the training data; 0 without usable training data.
func (d *dataCheck) rows() uint64 {
	if d.train == nil {
		return 0
	}
	return d.train.Rows
}

// all are the usable datasets.
func (d *dataCheck) all() []*input.Dataset {
	var out []*input.Dataset
	for _, data := range []*input.Dataset{d.train, d.eval} {
		if data != nil {
			out = append(out, data)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.suites)) {
		if !slices.Contains(out, d.suites[name]) {
			out = append(out, d.suites[name])
		}
	}
	return out
}

// scoredRows are the rows whose completions a reward scores.
type scoredRows struct {
	all   []*input.Dataset
	first *input.Dataset // its first rows are scored in the dry call, even if other rows have problems
	eval  *input.Dataset // nil without evaluations
}

// scoredByRun reports whether a suite that [reward] scores has the rows.
func (d *dataCheck) scoredByRun(data *input.Dataset) bool {
	for name, rows := range d.suites {
		if rows == data && d.config.GetEval().GetSuites()[name].GetReward() == nil {
			return true
		}
	}
	return false
}

// suiteRows are those that the own reward of a suite scores.
func (d *dataCheck) suiteRows(name string) scoredRows {
	data := d.suites[name]
	if data == nil {
		return scoredRows{}
	}
	return scoredRows{all: []*input.Dataset{data}, first: data}
}

func (d *dataCheck) scoredRows() scoredRows {
	rows := scoredRows{first: d.first}
	for _, data := range d.all() {
		if (data != d.train || !algorithm.FromData(d.config)) && (data == d.train || data == d.eval || d.scoredByRun(data)) {
			rows.all = append(rows.all, data)
		}
	}
	if d.config.GetEval().GetEverySteps() > 0 {
		rows.eval = d.eval
	}
	return rows
}
