package planner

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

const guess = `from rollout.environment import Result, SingleEpisode
from lib import hint

class Guess(SingleEpisode):
    def __init__(self, highest):
        self.highest = highest

    async def reset(self, task):
        return hint

    async def step(self, turn):
        return Result(reward=ANSWER)
`

// The plan plays a turn of the environment and pins its files.
func TestPlanPlaysTheEnvironment(t *testing.T) {
	t.Parallel()
	s := server(t)
	text := strings.NewReplacer("[reward]", "", `plugin = "reward.py:exact"`, "").Replace(configText)
	plan := func(answer, args string) *planv1.CreatePlanResponse {
		dir := project(t, "")
		for name, text := range map[string]string{"guess.py": strings.Replace(guess, "ANSWER", answer, 1), "lib.py": "hint = 'go'\n", "train.jsonl": "{\"secret\": 7}\n"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
			Toml: []byte(text), File: "run.toml", BaseDir: dir,
			Set: []string{`environment.kind="python"`, `environment.path="guess.py:Guess"`, "environment.args=" + args},
		}})
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	good := plan("1", "{highest=9}")
	var paths []string
	for _, in := range good.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_ENVIRONMENT {
			paths = append(paths, in.GetPath())
		}
	}
	if !slices.Equal(paths, []string{"guess.py", "lib.py"}) {
		t.Errorf("inputs %q, problems %v", paths, good.GetProblems())
	}
	for answer, want := range map[string]string{
		"1/0":   "`Guess.step` raised ZeroDivisionError: division by zero",
		"'yes'": "`Guess.step` returned str 'yes' as the reward",
	} {
		list := plan(answer, "{highest=9}").GetProblems()
		if len(list) != 1 || !strings.Contains(list[0].GetMessage(), want) || list[0].GetFix() == "" {
			t.Errorf("%s: %v", answer, list)
		}
	}
	if list := plan("1", "{lowest=1}").GetProblems(); len(list) != 1 || list[0].GetReason() != "ENVIRONMENT_IMPORT" || !strings.Contains(list[0].GetFix(), "`environment.args` must fit `Guess(highest)`") {
		t.Errorf("arguments: %v", list)
	}
}

// A misspelled kind is one problem: it says neither who scores the episodes nor what the rows hold.
func TestMisspelledKindIsOneProblem(t *testing.T) {
	t.Parallel()
	dir := project(t, "")
	for name, text := range map[string]string{"guess.py": strings.Replace(guess, "ANSWER", "1", 1), "lib.py": "hint = 'go'\n", "train.jsonl": "{\"secret\": 7}\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text := strings.NewReplacer("[reward]", "", `plugin = "reward.py:exact"`, "").Replace(configText)
	response, err := server(t).CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
		Toml: []byte(text), File: "run.toml", BaseDir: dir, Set: []string{`environment.kind="pyton"`, `environment.path="guess.py:Guess"`, "environment.args={highest=9}"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if list := response.GetProblems(); len(list) != 1 || list[0].GetFix() != `did you mean "python"?` {
		t.Errorf("problems %v", list)
	}
}

// servesOneTool speaks just enough of MCP for its tools to be listed.
const servesOneTool = `import json, sys

for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "initialize":
        version = request["params"]["protocolVersion"]
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    elif request["method"] == "tools/list":
        schema = {"type": "object", "properties": {"country": {"type": "string"}}}
        answer["result"] = {"tools": [{"name": "lookup", "description": "Find.", "inputSchema": schema}]}
    else:
        answer["error"] = {"code": -32601, "message": "unknown"}
    print(json.dumps(answer), flush=True)
`

// The plan starts the MCP servers and pins their tools and files.
func TestPlanListsToolsOfServers(t *testing.T) {
	t.Parallel()
	s := server(t)
	plan := func(args string) *planv1.CreatePlanResponse {
		dir := project(t, "def exact(samples):\n    return [0.0 for _ in samples]\n")
		template := `{"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}`
		for name, text := range map[string]string{"capitals.py": servesOneTool, "model/tokenizer_config.json": template} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
			Toml: []byte(configText), File: "run.toml", BaseDir: dir,
			Set: []string{`environment.kind="mcp"`, "model.chat_template=true", "environment.args.servers=" + args},
		}})
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	good := plan(`{capitals={command=["python", "capitals.py"]}}`)
	if tools := good.GetPlan().GetTools(); len(tools) != 1 || tools[0].GetServer() != "capitals" || tools[0].GetName() != "lookup" ||
		tools[0].GetParametersJson() != `{"properties": {"country": {"type": "string"}}, "type": "object"}` || !strings.HasPrefix(tools[0].GetDigest(), "sha256-") {
		t.Errorf("tools %v, problems %v", tools, good.GetProblems())
	}
	if !slices.ContainsFunc(good.GetPlan().GetInputs(), func(in *planv1.Input) bool {
		return in.GetRole() == planv1.InputRole_INPUT_ROLE_ENVIRONMENT && in.GetPath() == "capitals.py"
	}) {
		t.Errorf("inputs %v", good.GetPlan().GetInputs())
	}
	for args, want := range map[string]string{
		`{capitals={command=["pyhton", "capitals.py"]}}`:                 "the MCP server `capitals` can't be started: pyhton: No such file or directory",
		`{capitals={command=["python", "-c", "exit(3)"]}}`:               "the MCP server `capitals` ended (exit code 3)",
		`{capitals={command=["python", "capitals.py"], allow=["find"]}}`: "offers no tool `find`, which `allow` names",
		`{capitals={url="http://example.org/mcp"}}`:                      "is on the host example.org",
		`{capitals={command=["python", "capitals.py"], timeout=3}}`:      "has the unknown key `timeout`",
		`{}`: "`environment.args.servers` names no server",
	} {
		list := plan(args).GetProblems()
		if len(list) != 1 || !strings.Contains(list[0].GetMessage(), want) || list[0].GetFix() == "" {
			t.Errorf("%s: %v", args, list)
		}
	}
}

const calculator = `def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

def plain(a, b):
    return a + b
`

// The plan describes the tools as to the policy, and pins their files.
func TestPlanImportsTools(t *testing.T) {
	t.Parallel()
	s := server(t)
	plan := func(args string) *planv1.CreatePlanResponse {
		dir := project(t, "def exact(samples):\n    return [0.0 for _ in samples]\n")
		template := `{"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}`
		for name, text := range map[string]string{"calculator.py": calculator, "model/tokenizer_config.json": template} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		response, err := s.CreatePlan(t.Context(), &planv1.CreatePlanRequest{Source: &planv1.ConfigSource{
			Toml: []byte(configText), File: "run.toml", BaseDir: dir,
			Set: []string{`environment.kind="tools"`, "model.chat_template=true", "environment.args=" + args},
		}})
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	var paths []string
	good := plan(`{tools=["calculator.py:add"]}`)
	for _, in := range good.GetPlan().GetInputs() {
		if in.GetRole() == planv1.InputRole_INPUT_ROLE_ENVIRONMENT {
			paths = append(paths, in.GetPath())
		}
	}
	if !slices.Equal(paths, []string{"calculator.py"}) {
		t.Errorf("inputs %q, problems %v", paths, good.GetProblems())
	}
	for args, want := range map[string]string{
		`{tools=["calculator.py:plain"]}`: "the tool `plain` has no docstring",
		`{tools=["calculator.py:sub"]}`:   "no function `sub` is defined in calculator.py",
		`{tools=["pyhton"]}`:              "unknown tool `pyhton`",
		`{tools=["search"]}`:              "the tool `search` needs `environment.args.search`",
		`{}`:                              "`environment.args.tools` names no tools",
	} {
		list := plan(args).GetProblems()
		if len(list) != 1 || !strings.Contains(list[0].GetMessage(), want) || list[0].GetFix() == "" {
			t.Errorf("%s: %v", args, list)
		}
	}
}
