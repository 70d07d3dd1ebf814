// Package infer has a worker write completions and scores for a dataset: `rollout infer batch`.
//
// It starts no service. A worker process (`rollout-worker infer`) gets a file that names model, dataset, configuration and output; it
// keeps a journal beside the output, from which the same job goes on after any interruption.
package infer

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Job is a dataset to be answered. Paths are absolute, but for those of Config, which start at BaseDir.
type Job struct {
	Config        *configv1.RunConfig
	BaseDir       string
	Model         string // folder of the weights and the tokenizer
	WeightsDigest string // what the weights must have; "" where nothing is known of them
	Data, Output  string
	Limit         uint64 // rows from the start of the dataset; 0: all
	Threads       int    // of torch; 0: all cores
	Restart       bool   // forget what the journal has
	AllowFailures bool

	Worker  []string // command that starts a worker; "infer" is appended
	Scratch string   // an existing folder
	Lock    *os.File // holds Scratch for as long as the worker lives; nil: nobody sweeps
}

// Event is a line of the worker's: `loading`, `begin`, `progress`, `end`, `interrupted` or `error`.
type Event struct {
	Event       string            `json:"event"`
	Rows        int               `json:"rows"`
	Of          int               `json:"of"`
	Kept        int               `json:"kept"` // rows that the journal had
	Samples     int               `json:"samples"`
	Tokens      int               `json:"tokens"`
	Seconds     float64           `json:"seconds"`
	MeanScore   *float64          `json:"mean_score"`
	Statuses    map[string]uint64 `json:"statuses"`
	Failures    map[string]uint64 `json:"failures"` // samples without a result, by reason
	Retries     int               `json:"retries"`  // calls of the reward that were repeated after a failure
	Model       string            `json:"model"`    // that is loaded
	Output      string            `json:"output"`
	Journal     string            `json:"journal"`
	ModelDigest string            `json:"model_digest"`

	Code    int    `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Fix     string `json:"fix"`
}

// leaveSeconds is how long a worker that was told to stop may take to keep what it has.
const leaveSeconds = 20

// Run has the worker do it. told gets each of its lines as it comes; log what it warns of. The answer is its `end`; the error is typed,
// and says after an interruption how to go on.
func (j *Job) Run(ctx context.Context, told func(Event), log func(line string)) (Event, error) {
	spec, err := j.spec()
	if err != nil {
		return Event{}, err
	}
	args := append(slices.Clone(j.Worker), "infer", "--spec", spec)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is ours to pass on
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = leaveSeconds * time.Second
	if j.Lock != nil {
		cmd.ExtraFiles = []*os.File{j.Lock}
	}
	if _, err := cmd.StdinPipe(); err != nil { // its end tells the worker that nobody waits any more
		return Event{}, fmt.Errorf("start %s: %w", args[0], err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return Event{}, fmt.Errorf("start %s: %w", args[0], err)
	}
	words := &warnings{tell: log, again: map[string]int{}}
	cmd.Stderr = words
	if err := cmd.Start(); err != nil {
		return Event{}, exit.New(exit.NoInput, "build it (`make build`), or name the command with --worker", "start the worker: %w", err)
	}
	var last Event
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		var e Event
		if json.Unmarshal(line, &e) == nil && e.Event != "" { // else a library that prints
			last = e
			told(e)
		}
		if err != nil {
			break
		}
	}
	failed := cmd.Wait() // until all that it wrote is read
	words.counts()
	return j.ended(ctx, last, failed, words)
}

// ended makes an answer or an error of how the worker left.
func (j *Job) ended(ctx context.Context, last Event, failed error, words *warnings) (Event, error) {
	again := "the same command goes on from " + j.Output + ".journal"
	switch {
	case last.Event == "end" && failed == nil:
		return last, nil
	case last.Event == "error":
		return last, &exit.Error{Code: last.Code, Reason: last.Reason, Fix: last.Fix, Err: errors.New(last.Message)}
	case last.Event == "interrupted":
		return last, exit.New(exit.Interrupted, again, "interrupted after %d of %d rows", last.Rows, last.Of)
	case ctx.Err() != nil:
		return last, exit.New(exit.Interrupted, "the same command goes on from what was done", "interrupted")
	}
	return last, exit.New(exit.Software, again, "the worker ended before it was done: %w\n%s", failed, words.tail())
}

func (j *Job) spec() (string, error) {
	config, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(j.Config)
	if err != nil {
		return "", fmt.Errorf("write what to do: %w", err)
	}
	text, err := json.Marshal(map[string]any{
		"config": json.RawMessage(config), "base_dir": j.BaseDir, "model": j.Model, "weights_digest": j.WeightsDigest, "data": j.Data,
		"output": j.Output, "limit": j.Limit, "threads": j.Threads, "restart": j.Restart, "allow_failures": j.AllowFailures,
	})
	if err != nil {
		return "", fmt.Errorf("write what to do: %w", err)
	}
	path := filepath.Join(j.Scratch, "spec.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return "", exit.New(exit.CannotMake, "", "write what to do: %w", err)
	}
	return path, nil
}

// warnings passes on what the worker warns of, not all of it and nothing twice, and keeps its last words.
type warnings struct {
	tell  func(string)
	told  []string
	again map[string]int // what was told, and came again
	more  bool           // than are told
	part  string
	last  []byte
}

const (
	mostTold = 20
	mostKept = 4000 // bytes
)

var _ io.Writer = (*warnings)(nil)

// Write implements io.Writer; one goroutine calls it.
func (w *warnings) Write(data []byte) (int, error) {
	w.last = append(w.last, data...)
	w.last = w.last[max(0, len(w.last)-mostKept):]
	w.part += string(data)
	for {
		line, rest, found := strings.Cut(w.part, "\n")
		if !found {
			w.part = w.part[max(0, len(w.part)-mostKept):]
			return len(data), nil
		}
		w.part = rest
		_, message, warned := strings.Cut(line, " WARNING ")
		if !warned {
			_, message, warned = strings.Cut(line, " ERROR ")
		}
		if _, text, named := strings.Cut(message, ": "); warned && named {
			w.warned(text)
		}
	}
}

func (w *warnings) warned(text string) {
	switch {
	case slices.Contains(w.told, text):
		w.again[text]++
	case len(w.told) < mostTold:
		w.told = append(w.told, text)
		w.tell(text)
	case !w.more:
		w.more = true
		w.tell("further warnings are not shown")
	}
}

// counts says how often warnings came again, when no more will come.
func (w *warnings) counts() {
	for _, text := range w.told {
		if n := w.again[text]; n > 0 {
			w.tell(fmt.Sprintf("%s more: %s", output.Count(n), text))
		}
	}
}

func (w *warnings) tail() string { return strings.TrimSpace(string(w.last)) }
