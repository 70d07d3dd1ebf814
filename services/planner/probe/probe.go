// Package probe does the planner's work that needs Python: it prepares rows and downloads models,
// tokenizes the prompts, calls the reward once, and asks for the versions of packages. Each request
// is a short-lived process, `python -m rollout.probe`.
package probe

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

const (
	startUp   = 2 * time.Minute // an interpreter starts slowly on a busy machine
	tokenize  = 10 * time.Minute
	download  = 12 * time.Hour // of a large model; the context of the caller can end it
	killDelay = 10 * time.Second
)

// Packages decide what a run computes.
var Packages = []string{"rollout-rl", "torch", "transformers", "tokenizers", "safetensors", "numpy"}

// Request is the input of the process. Each part is optional.
type Request struct {
	Data        []Data       `json:"data,omitempty"`
	Models      []Model      `json:"models,omitempty"`
	Packages    []string     `json:"packages,omitempty"`
	Reward      *Reward      `json:"reward,omitempty"`
	Tokenizer   *Tokenizer   `json:"tokenizer,omitempty"`
	Teacher     *Teacher     `json:"teacher,omitempty"`
	Environment *Environment `json:"environment,omitempty"`
	Plugins     []string     `json:"plugins,omitempty"`   // installed packages of plugins
	WandbKey    bool         `json:"wandb_key,omitempty"` // whether to look for the key of W&B
}

// Data asks for the rows of one or several sources in one JSON Lines file. Until is
// `data.mix_until`.
type Data struct {
	BaseDir  string    `json:"base_dir"`
	Output   string    `json:"output"`
	Seed     uint64    `json:"seed"`
	Until    string    `json:"until"`
	Sources  []Source  `json:"sources"`
	Baseline *Baseline `json:"baseline,omitempty"` // nil: the rows have no completions to compare with
}

// Baseline has the completions that the rows get. The first Limit rows stay; 0: all. In the answer
// it is a source with the name BaselineSource.
type Baseline struct {
	Path  string `json:"path"`
	Limit uint64 `json:"limit"`
}

// BaselineSource is the name of a baseline among the sources of rows.
const BaselineSource = "baseline"

// Source is a source of rows. Revision pins a data set of the hub to the commit of an older plan.
// Rename maps its fields to those of the configuration. Booleans and Numbers are fields that
// formats without types have as texts.
type Source struct {
	Name     string            `json:"name"`
	Path     string            `json:"path"`
	Subset   string            `json:"subset"`
	Split    string            `json:"split"`
	Weight   *float64          `json:"weight"`
	Revision string            `json:"revision"`
	Rename   map[string]string `json:"rename"`
	Booleans []string          `json:"booleans"`
	Numbers  []string          `json:"numbers"`
}

// Model asks for the files of a model of the hub that match a pattern.
type Model struct {
	Name     string   `json:"name"`
	Patterns []string `json:"patterns"`
}

// Teacher asks the endpoint of a teacher once for the logprobs of a prompt. Model is the folder of
// the tokenizer, APIKey a reference.
type Teacher struct {
	Model          string  `json:"model"`
	BaseURL        string  `json:"base_url"`
	Name           string  `json:"name"`
	APIKey         string  `json:"api_key"`
	Protocol       string  `json:"protocol"`
	TimeoutSeconds float64 `json:"timeout_seconds"`
	Prompt         string  `json:"prompt"`
}

// Reward asks for one call of a plugin or an expression. Files have the rows whose fields an
// expression uses; Model is the folder of the tokenizer. HeldOut are scored by a separate call.
type Reward struct {
	Plugin         string   `json:"plugin,omitempty"`
	Expression     string   `json:"expression,omitempty"`
	Evaluates      bool     `json:"evaluates,omitempty"` // it scores a suite, and may be an evaluation
	BaseDir        string   `json:"base_dir"`
	TimeoutSeconds float64  `json:"timeout_seconds"`
	Samples        []Sample `json:"samples"`
	HeldOut        []Sample `json:"held_out,omitempty"`
	Files          []Rows   `json:"files,omitempty"`
	Model          string   `json:"model,omitempty"`
	Sandbox        *Limits  `json:"sandbox,omitempty"` // of the sandbox in which it is called; nil: none
}

// Limits are those of a sandbox; CPUs 0 is none.
type Limits struct {
	MemoryBytes uint64  `json:"memory_bytes"`
	Pids        uint32  `json:"pids"`
	CPUs        float64 `json:"cpus"`
	OutputBytes uint64  `json:"output_bytes"`
	DiskBytes   uint64  `json:"disk_bytes"`
}

// Environment asks for one turn of an environment on each of the rows: of the class Plugin, or of
// the environment that rollout has for Kind. Args is a JSON object. Python is another interpreter.
// With the kind "multistep", Plugin may be an id of gymnasium, and Model, Chunk, and RewardType are
// those of the policy that acts in it.
type Environment struct {
	Plugin         string            `json:"plugin"`
	Kind           string            `json:"kind,omitempty"`
	Python         string            `json:"-"`
	BaseDir        string            `json:"base_dir"`
	Args           string            `json:"args"`
	TimeoutSeconds float64           `json:"timeout_seconds"`
	Rows           []json.RawMessage `json:"rows"`
	Model          string            `json:"model,omitempty"`
	Chunk          uint32            `json:"chunk,omitempty"`
	RewardType     string            `json:"reward_type,omitempty"`
}

// Rows is a dataset and its name in messages.
type Rows struct {
	Path string `json:"path"`
	Name string `json:"name"`
}

// Sample is what a reward scores.
type Sample struct {
	Prompt     string          `json:"prompt"`
	Completion string          `json:"completion"`
	Row        json.RawMessage `json:"row"`
}

// Tokenizer asks for the length of every prompt.
type Tokenizer struct {
	Model        string `json:"model"`
	ChatTemplate bool   `json:"chat_template"`
	Files        []File `json:"files"`
}

// File is one dataset. Limit is the largest number of tokens of a row: of its prompt, and if there
// are AnswerFields also of the longest of these completions and the end token. Overlong is
// `data.overlong`.
type File struct {
	Path         string   `json:"path"`
	PromptField  string   `json:"prompt_field"`
	AnswerFields []string `json:"answer_fields,omitempty"`
	Limit        int64    `json:"limit"`
	Overlong     string   `json:"overlong,omitempty"`
}

// Answer is the output of the process.
type Answer struct {
	Python   string              `json:"python"`
	Data     []DataAnswer        `json:"data"`
	Models   []ModelAnswer       `json:"models"`
	Packages map[string]*string  `json:"packages"`
	Plugins  map[string]*Package `json:"plugins"`
	WandbKey bool                `json:"wandb_key"` // whether W&B has a key
	Reward   *struct {
		Files   []string  `json:"files"`
		Parts   bool      `json:"parts"` // whether it rewards parts of a completion
		Plugins []Package `json:"plugins"`
		// Scores are those of the samples.
		Scores []struct {
			Reward float64 `json:"reward"`
		} `json:"scores"`
		Error *Error `json:"error"`
	} `json:"reward"`
	Tokenizer *struct {
		Files []Lengths `json:"files"`
		Error *Error    `json:"error"`
	} `json:"tokenizer"`
	Teacher *struct {
		Error *Error `json:"error"`
	} `json:"teacher"`
	Environment *EnvironmentAnswer `json:"environment"`
}

// EnvironmentAnswer is what the probe found when it played an environment.
type EnvironmentAnswer struct {
	Files   []string  `json:"files"`
	Tools   []Tool    `json:"tools"` // of MCP servers
	Plugins []Package `json:"plugins"`
	Saves   bool      `json:"saves_episodes"`
	Error   *Error    `json:"error"`
}

// Package is an installed package with a plugin of a kind.
type Package struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Digest  string `json:"digest"`
	Kind    string `json:"kind"`
}

// Tool is a tool of an MCP server. Parameters is a JSON schema.
type Tool struct {
	Server      string `json:"server"`
	Name        string `json:"name"`
	Description string `json:"description"`
	Parameters  string `json:"parameters"`
	Digest      string `json:"digest"`
}

// DataAnswer describes the rows of a file that was written, or the error of the source with a name.
type DataAnswer struct {
	Rows    uint64    `json:"rows"`
	Plugins []Package `json:"plugins"`
	Sources []struct {
		Name     string   `json:"name"`
		Path     string   `json:"path"`
		Revision string   `json:"revision"`
		Subset   string   `json:"subset"`
		Split    string   `json:"split"`
		Rows     uint64   `json:"rows"`
		Taken    uint64   `json:"taken"`
		Files    []string `json:"files"`
	} `json:"sources"`
	Error  *Error `json:"error"`
	Source string `json:"source"`
}

// ModelAnswer is the folder and the commit of a model.
type ModelAnswer struct {
	Folder   string `json:"folder"`
	Revision string `json:"revision"`
	Error    *Error `json:"error"`
}

// Lengths are the token counts of one dataset. Rows count from 0. Drop are the rows to leave out,
// and Cut the number of rows that workers truncate.
type Lengths struct {
	Longest  int64    `json:"longest"`
	Over     int64    `json:"over"`
	Drop     []uint64 `json:"drop"`
	Cut      uint64   `json:"cut"`
	Examples []struct {
		Row    uint64 `json:"row"`
		Tokens int64  `json:"tokens"`
	} `json:"examples"`
	Empty   []uint64 `json:"empty"`
	Unknown int64    `json:"unknown"` // number of rows with text outside of the vocabulary
	Strange []struct {
		Row   uint64 `json:"row"`
		Field string `json:"field"` // its first field with such text
		Text  string `json:"text"`  // the first such text
	} `json:"strange"`
}

// Error is an error from Python.
type Error struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Fix     string `json:"fix"`
	File    string `json:"file"`
	Line    uint32 `json:"line"`
	Column  uint32 `json:"column"`
	Text    string `json:"text"`
}

func (e *Error) Error() string { return e.Reason + ": " + e.Message }

// Prober starts the processes.
type Prober struct {
	Python     string        // interpreter
	PythonPath string        // folder of the package `rollout` if it is not installed
	Env        []string      // environment of the processes
	StartUp    time.Duration // time limit until the call of the reward begins; 0 is two minutes
	KillDelay  time.Duration // from the time limit of a reward that blocks the interpreter to its end; 0 is 10 s
}

// Ask runs one process. The error is an *Error if the process hung, and of another type if it could
// not run.
func (p *Prober) Ask(ctx context.Context, request Request) (*Answer, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("encode a probe's request: %w", err)
	}
	limit := cmp.Or(p.StartUp, startUp)
	if request.Teacher != nil {
		limit += time.Duration(request.Teacher.TimeoutSeconds * float64(time.Second))
	}
	if request.Tokenizer != nil {
		limit = tokenize
	}
	if len(request.Data)+len(request.Models) > 0 {
		limit = download
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	late := errStart
	timer := time.AfterFunc(limit, func() { cancel(late) })
	defer timer.Stop()
	stdout := output{began: func() {}}
	if users := p.usersLimit(request); users > 0 {
		stdout.began = func() {
			if timer.Stop() {
				late = errUsers
				timer.Reset(users)
			}
		}
	}
	var stderr tail
	python := p.Python
	if request.Environment != nil {
		python = cmp.Or(request.Environment.Python, python)
	}
	cmd := exec.CommandContext(ctx, python, "-P", "-m", "rollout.probe")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(body), &stdout, &stderr
	cmd.Dir = os.TempDir()
	cmd.Env = append(append([]string(nil), p.Env...), "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1", "TOKENIZERS_PARALLELISM=true")
	if p.PythonPath != "" {
		cmd.Env = append(cmd.Env, "PYTHONPATH="+p.PythonPath)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	if cmd.Process != nil { // child processes of the user's code
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	if errors.Is(context.Cause(ctx), errStart) {
		return nil, &Error{
			Reason: "PROBE_FAILED", Message: fmt.Sprintf("the Python probe was not ready after %v", limit),
			Fix: "try again when the machine is less busy, or see what its Python starts with: `python -X importtime -m rollout.probe`",
		}
	}
	if errors.Is(context.Cause(ctx), errUsers) {
		return nil, killed(request)
	}
	var answer Answer
	if jsonErr := json.Unmarshal(stdout.kept, &answer); jsonErr == nil {
		return &answer, nil
	}
	if err == nil {
		err = errors.New("it printed no answer")
	}
	if text := stderr.lastLine(); text != "" {
		return nil, fmt.Errorf("%w; its last line: %s", err, text)
	}
	return nil, err
}

// usersLimit is the time limit of the user's code: the import and each call. 0 without such code.
func (p *Prober) usersLimit(request Request) time.Duration {
	var calls, seconds float64
	delay := cmp.Or(p.KillDelay, killDelay)
	switch {
	case request.Reward != nil:
		calls, seconds = 2, request.Reward.TimeoutSeconds
		if len(request.Reward.HeldOut) > 0 {
			calls++
		}
		if request.Reward.Sandbox != nil { // a second interpreter starts in it
			delay += startUp
		}
	case request.Environment != nil:
		calls, seconds = 4, request.Environment.TimeoutSeconds // import, reset, step, close
	default:
		return 0
	}
	return time.Duration(calls*seconds*float64(time.Second)) + delay
}

// killed is the error of the user's code that did not return.
func killed(request Request) *Error {
	found := &Error{Reason: "REWARD_TIMEOUT", Fix: "make it faster or raise `reward.timeout_seconds`"}
	var name string
	if request.Reward != nil {
		name = request.Reward.Plugin + request.Reward.Expression
	} else {
		name = request.Environment.Plugin
		found.Reason, found.Fix = "ENVIRONMENT_TIMEOUT", "make it faster or raise `environment.turn_timeout_seconds`"
	}
	found.Message = fmt.Sprintf("`%s` did not return and had to be killed", name)
	return found
}

var (
	errStart = errors.New("it was not ready")
	errUsers = errors.New("the code of the user did not return")
)

// output keeps the answer of the process. The process writes a line break before it calls the
// reward.
type output struct {
	kept  []byte
	began func()
}

func (o *output) Write(p []byte) (int, error) {
	if len(o.kept) == 0 && len(p) > 0 {
		o.began()
	}
	o.kept = append(o.kept, p...)
	return len(p), nil
}

// tail keeps the end of its input.
type tail struct{ kept []byte }

func (t *tail) Write(p []byte) (int, error) {
	const most = 8192
	t.kept = append(t.kept, p...)
	if len(t.kept) > most {
		t.kept = append(t.kept[:0], t.kept[len(t.kept)-most:]...)
	}
	return len(p), nil
}

func (t *tail) lastLine() string {
	lines := strings.Split(strings.TrimSpace(string(t.kept)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
