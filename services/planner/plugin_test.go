package planner

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// withPackage is a server whose Python has an installed package acme-rewards with these entry
// points, and the folder of the package.
func withPackage(t *testing.T, code string, entries ...string) (*Server, string) {
	t.Helper()
	site := t.TempDir()
	writeAll(t, site, map[string]string{
		"acme_rewards.py":                                code,
		"acme_rewards-1.0.dist-info/METADATA":            "Metadata-Version: 2.1\nName: acme-rewards\nVersion: 1.0\n",
		"acme_rewards-1.0.dist-info/RECORD":              "acme_rewards.py,,\nacme_rewards-1.0.dist-info/METADATA,,\nacme_rewards-1.0.dist-info/RECORD,,\n",
		"acme_rewards-1.0.dist-info/entry_points.txt":    "[rollout.plugins]\n" + strings.Join(entries, "\n") + "\n",
		"acme_rewards-1.0.dist-info/INSTALLER":           "test\n",
		"acme_rewards-1.0.dist-info/direct_url.json":     "{}",
		"unrelated/another-package-of-the-same-site.txt": "",
	})
	config := prober(t)
	config.PythonPath = config.PythonPath + string(os.PathListSeparator) + site
	s, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	return s, site
}

func writeAll(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
}

// text is a problem as people read it.
func text(p *planv1.Problem) string {
	return fmt.Sprintf("%s %s:%d: %s: %s", p.GetReason(), filepath.Base(p.GetFile()), p.GetLine(), p.GetMessage(), p.GetFix())
}

const scored = "def exact(samples):\n    return [float(s.completion == s.row['answer']) for s in samples]\n"

func TestThePackageOfAPluginIsPinned(t *testing.T) {
	t.Parallel()
	s, site := withPackage(t, scored, "reward.exact = acme_rewards:exact")
	dir := project(t, "")
	const use = `reward.plugin="acme-rewards:exact"`
	plan := create(t, s, dir, use)
	if len(plan.GetProblems()) > 0 {
		t.Fatal(plan.GetProblems())
	}
	pinned := plan.GetPlan().GetPlugins()
	if len(pinned) != 1 || pinned[0].GetName() != "acme-rewards" || pinned[0].GetVersion() != "1.0" || !slices.Equal(pinned[0].GetKinds(), []string{"reward"}) {
		t.Fatalf("pinned %v", pinned)
	}
	verify := func() []string {
		t.Helper()
		verified, err := s.VerifyPlan(t.Context(), &planv1.VerifyPlanRequest{Lock: plan.GetLock(), File: "plan.lock", BaseDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, p := range verified.GetProblems() {
			out = append(out, text(p))
		}
		return out
	}
	expect := func(want string) {
		t.Helper()
		if got := verify(); want == "" && len(got) > 0 || want != "" && (len(got) != 1 || !strings.HasPrefix(got[0], want)) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	expect("")
	writeAll(t, site, map[string]string{"acme_rewards-1.0.dist-info/INSTALLER": "another\n"})
	expect("") // what an installer writes is not part of the package
	writeAll(t, site, map[string]string{"acme_rewards.py": scored + "# changed\n"})
	expect("PLUGIN_CHANGED plan.lock:0: the files of acme-rewards 1.0 changed since the plan was made: sha256-")
	if again := create(t, s, dir, use).GetPlan().GetPlugins()[0].GetDigest(); again == pinned[0].GetDigest() {
		t.Error("a changed package has the same digest")
	}
	writeAll(t, site, map[string]string{"acme_rewards-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-rewards\nVersion: 2.0\n"})
	expect("PLUGIN_CHANGED plan.lock:0: the plan has plugins of acme-rewards 1.0, but 2.0 is installed: install acme-rewards==1.0, or create")
	if err := os.RemoveAll(filepath.Join(site, "acme_rewards-1.0.dist-info")); err != nil {
		t.Fatal(err)
	}
	expect("PLUGIN_CHANGED plan.lock:0: the plan has plugins of acme-rewards 1.0, which is not installed: ")
}

func TestProblemsOfPluginsOfPackages(t *testing.T) {
	t.Parallel()
	s, _ := withPackage(t, scored+"wrong = 3\ndef many(a, b):\n    pass\n", "reward.exact = acme_rewards:exact", "tool.add = acme_rewards:add", "reward.wrong = acme_rewards:absent",
		"reward.many = acme_rewards:many", "source.rows = acme_rewards:rows", "reward.bad = acme_rewards")
	dir := project(t, "")
	for use, want := range map[string]string{
		`reward.plugin="acme-reward:exact"`:  "PLUGIN_NOT_INSTALLED run.toml:11: no package `acme-reward` is installed in the Python of the workers: did you mean `acme-rewards`?",
		`reward.plugin="nothing-like:exact"`: "PLUGIN_NOT_INSTALLED run.toml:11: no package `nothing-like` is installed in the Python of the workers: run `rollout plugin install PACKAGE`",
		`reward.plugin="acme-rewards:bad"`:   "PLUGIN_ENTRY_POINT run.toml:11: acme-rewards 1.0: the entry point `reward.bad` has 'acme_rewards', not `module:object`: correct its pyproject.toml",
		`reward.plugin="acme-rewards:rows"`:  "PLUGIN_ENTRY_POINT run.toml:11: acme-rewards 1.0: the entry point `source.rows` is not `KIND.NAME` with one of the kinds reward, environment, ",
		`reward.plugin="acme-rewards:wrong"`: "PLUGIN_ENTRY_POINT run.toml:11: importing `acme_rewards:absent` of acme-rewards:wrong raises AttributeError: ",
		`reward.plugin="acme-rewards:many"`:  "REWARD_IMPORT ",
		`reward.plugin="a/b:exact"`:          "BAD_VALUE ",
	} {
		problems := create(t, s, dir, use).GetProblems()
		if len(problems) != 1 || !strings.HasPrefix(strings.Replace(text(problems[0]), " --set:1:", " run.toml:11:", 1), want) {
			t.Errorf("%s: got %v, want %q", use, problems, want)
		}
	}
}

func TestRowsOfADataSourceArePinned(t *testing.T) {
	t.Parallel()
	s := server(t)
	dir := project(t, scored)
	writeAll(t, dir, map[string]string{
		"rows.py":   "import sums\n\ndef odd(split):\n    if split == 'raise':\n        raise ValueError('no such split')\n    for n in range(1, 2000 if split == 'train' else 3, 2):\n        yield {'prompt': f'{n}+1=', 'answer': sums.add(n, 1)}\n\ndef one():\n    pass\n\ndef text(split):\n    return 'rows'\n\ndef numbers(split):\n    return [1, 2]\n",
		"sums.py":   "def add(a, b): return str(a + b)\n",
		"test.toml": "",
	})
	plan := create(t, s, dir, `data.train="rows.py:odd"`, `data.eval="rows.py:odd"`)
	if len(plan.GetProblems()) > 0 {
		t.Fatal(plan.GetProblems())
	}
	rows := map[planv1.InputRole]*planv1.Input{}
	for _, in := range plan.GetPlan().GetInputs() {
		rows[in.GetRole()] = in
	}
	train, eval := rows[planv1.InputRole_INPUT_ROLE_TRAIN_DATA], rows[planv1.InputRole_INPUT_ROLE_EVAL_DATA]
	if train.GetRows() != 1000 || eval.GetRows() != 1 || train.GetPath() != "rows.py:odd" || train.GetDigest() == eval.GetDigest() {
		t.Errorf("train %v, eval %v", train, eval)
	}
	var files []string
	for _, file := range train.GetSources()[0].GetFiles() {
		files = append(files, file.GetPath())
	}
	if !slices.Contains(files, "rows.py") || !slices.Contains(files, "sums.py") {
		t.Errorf("files %q", files)
	}
	if again := create(t, s, dir, `data.train="rows.py:odd"`, `data.eval="rows.py:odd"`); again.GetPlan().GetPlanId() != plan.GetPlan().GetPlanId() {
		t.Error("a second plan differs")
	}
	for set, want := range map[string]string{
		`data.train="rows.py:even"`:    "DATA_SOURCE_IMPORT no function `even` is defined in rows.py: it has ",
		`data.train="absent.py:odd"`:   "DATA_SOURCE_IMPORT can't read absent.py: No such file or directory: ",
		`data.train="rows.py:one"`:     "DATA_SOURCE_IMPORT `one` can't be called with the name of a split: it is `one()`: ",
		`data.train="rows.py:text"`:    "DATA_SOURCE_BAD_RESULT `text` returned str, not rows: yield mappings",
		`data.train="rows.py:numbers"`: "DATA_SOURCE_BAD_RESULT row 1 of `numbers` is of type int, not a mapping: ",
		`data.train_split="raise"`:     "DATA_SOURCE_RAISED `odd('raise')` raises ValueError: no such split at row 1: correct the function",
		`data.train="acme:odd"`:        "PLUGIN_NOT_INSTALLED no package `acme` is installed in the Python of the workers: ",
		`data.train="test.toml:odd"`:   "PLUGIN_MANIFEST test.toml: `name` is missing: ",
	} {
		problems := create(t, s, dir, `data.train="rows.py:odd"`, set).GetProblems()
		if len(problems) != 1 || !strings.HasPrefix(problems[0].GetReason()+" "+problems[0].GetMessage()+": "+problems[0].GetFix(), want) {
			t.Errorf("%s: got %v, want %q", set, problems, want)
		}
	}
	writeAll(t, dir, map[string]string{"sums.py": "def add(a, b): return str(a - b)\n"})
	verified, err := s.VerifyPlan(t.Context(), &planv1.VerifyPlanRequest{Lock: plan.GetLock(), File: "plan.lock", BaseDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if p := verified.GetProblems(); len(p) == 0 || p[0].GetReason() != "INPUT_CHANGED" || p[0].GetFile() != "sums.py" {
		t.Errorf("problems: %v", p)
	}
}
