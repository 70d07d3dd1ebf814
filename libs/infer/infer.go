// Package infer runs a worker that writes completions and scores for a dataset.
//
// It starts no service. The worker process (`rollout-worker infer`) reads a file that names the
// model, the dataset, the configuration and the output. It keeps a journal next to the output, from
// which the same job continues after an interruption.
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

	"github.com/rollout-rl/rollout/libs/exit"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Job describes the work. Paths are absolute, except those of Config, which are relative to
// BaseDir.
type Job struct {
	Config        *configv1.RunConfig
	BaseDir       string
	Model         string // folder of the weights and the tokenizer
	WeightsDigest string // expected digest of the weights; "" if unknown
	Data, Output  string // Data: an absolute path or pattern, or a name on the hub
	Subset, Split string // of a data set that has some
	Limit         uint64 // number of rows, from the start of the dataset; 0: all
	Threads       int    // of torch; 0: all cores
	Restart       bool   // discard the journal
	AllowFailures bool   // write the output even if samples have no score

	// For an evaluation; "" for each: none.
	Baseline string // an output whose completions the rows get as `baseline`
	Cluster  string // field of the rows that groups related ones
	Scores   string // file for the scores of the rows
	Library  any    // of a suite whose tasks are those of a library (rollout.suites.types.Request)

	Worker  []string // command that starts a worker; "infer" is appended
	Scratch string   // an existing folder
	Lock    *os.File // locks Scratch while the worker lives; nil: Scratch is not locked
}

// Metric is a number that a library measured. Stderr is nil if it has no standard error.
type Metric struct {
	Name    string   `json:"name"`
	Value   float64  `json:"value"`
	Stderr  *float64 `json:"stderr"`
	Samples int      `json:"samples"`
}

// Ready is the event of a worker that needs an endpoint for the tasks of a library.
const Ready = "ready"

// Event is a line of the worker's output: `loading`, `begin`, `progress`, `end`, `interrupted`,
// `error`, or Ready.
type Event struct {
	Event       string            `json:"event"`
	Rows        int               `json:"rows"`
	Dropped     int               `json:"dropped"` // rows that are too long
	Of          int               `json:"of"`
	Kept        int               `json:"kept"` // rows in the journal
	Samples     int               `json:"samples"`
	Tokens      int               `json:"tokens"`
	Seconds     float64           `json:"seconds"`
	MeanScore   *float64          `json:"mean_score"`
	Statuses    map[string]uint64 `json:"statuses"`
	Failures    map[string]uint64 `json:"failures"` // samples without a result, by reason
	Retries     int               `json:"retries"`  // repeated calls of the reward
	Model       string            `json:"model"`    // folder of the model that is loaded
	Output      string            `json:"output"`
	Journal     string            `json:"journal"`
	ModelDigest string            `json:"model_digest"`
	Metrics     []Metric          `json:"metrics"` // of a library
	Version     string            `json:"version"` // of the library

	Code    int    `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	Fix     string `json:"fix"`
}

// stopTimeout is how long a worker may take to write its journal after SIGTERM.
const stopTimeout = 20 * time.Second

// Observer receives what the worker reports. Its two functions may be called concurrently.
type Observer struct {
	Event   func(Event)
	Warning func(text string, repeated int) // repeated: 0 for a new event, or how often it was repeated
}

// Run runs the worker and returns its `end` event. Errors have an exit code (exit.Error); after an
// interruption the error says how to continue.
func (j *Job) Run(ctx context.Context, o Observer) (Event, error) {
	spec, err := j.spec()
	if err != nil {
		return Event{}, err
	}
	args := append(slices.Clone(j.Worker), "infer", "--spec", spec)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C must reach only this process, which sends SIGTERM
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTimeout
	if j.Lock != nil {
		cmd.ExtraFiles = []*os.File{j.Lock}
	}
	if _, err := cmd.StdinPipe(); err != nil { // the worker stops when this process dies and the pipe closes
		return Event{}, fmt.Errorf("start %s: %w", args[0], err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return Event{}, fmt.Errorf("start %s: %w", args[0], err)
	}
	log := &warnings{report: o.Warning, repeated: map[string]int{}}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		return Event{}, exit.New(exit.NoInput, "build it (`make build`), or name the command with --worker", "start the worker: %w", err)
	}
	var last Event
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		var e Event
		if json.Unmarshal(line, &e) == nil && e.Event != "" { // else output of a library
			last = e
			o.Event(e)
		}
		if err != nil {
			break
		}
	}
	failed := cmd.Wait()
	log.flush()
	return j.result(ctx, last, failed, log)
}

// result returns the last event, or the error with which the worker ended.
func (j *Job) result(ctx context.Context, last Event, failed error, log *warnings) (Event, error) {
	again := "the same command continues from " + j.Output + ".journal"
	switch {
	case (last.Event == "end" || last.Event == Ready) && failed == nil:
		return last, nil
	case last.Event == "error":
		return last, &exit.Error{Code: last.Code, Reason: last.Reason, Fix: last.Fix, Err: errors.New(last.Message)}
	case last.Event == "interrupted":
		return last, exit.New(exit.Interrupted, again, "interrupted after %d of %d rows", last.Rows, last.Of)
	case ctx.Err() != nil:
		return last, exit.New(exit.Interrupted, "the same command continues from the finished rows", "interrupted")
	}
	return last, exit.New(exit.Software, again, "the worker exited before it had finished: %w\n%s", failed, log.tail())
}

func (j *Job) spec() (string, error) {
	config, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(j.Config)
	if err != nil {
		return "", fmt.Errorf("write the worker's spec: %w", err)
	}
	text, err := json.Marshal(map[string]any{
		"config": json.RawMessage(config), "base_dir": j.BaseDir, "model": j.Model, "weights_digest": j.WeightsDigest, "data": j.Data,
		"subset": j.Subset, "split": j.Split,
		"output": j.Output, "limit": j.Limit, "threads": j.Threads, "restart": j.Restart, "allow_failures": j.AllowFailures,
		"baseline": j.Baseline, "cluster": j.Cluster, "scores": j.Scores, "library": j.Library,
	})
	if err != nil {
		return "", fmt.Errorf("write the worker's spec: %w", err)
	}
	path := filepath.Join(j.Scratch, "spec.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return "", exit.New(exit.CannotMake, "", "write the worker's spec: %w", err)
	}
	return path, nil
}

// warnings reports the warnings of a worker's log, each text once, and keeps the end of the log.
type warnings struct {
	report   func(text string, repeated int)
	reported []string
	repeated map[string]int // repetitions of reported warnings
	limited  bool           // maxWarnings is exceeded
	line     string         // unfinished
	end      []byte
}

const (
	maxWarnings = 20
	maxTail     = 4000 // bytes
)

var _ io.Writer = (*warnings)(nil)

// Write implements io.Writer. It is not safe for concurrent use.
func (w *warnings) Write(data []byte) (int, error) {
	w.end = append(w.end, data...)
	w.end = w.end[max(0, len(w.end)-maxTail):]
	w.line += string(data)
	for {
		line, rest, found := strings.Cut(w.line, "\n")
		if !found {
			w.line = w.line[max(0, len(w.line)-maxTail):]
			return len(data), nil
		}
		w.line = rest
		_, message, warned := strings.Cut(line, " WARNING ")
		if !warned {
			_, message, warned = strings.Cut(line, " ERROR ")
		}
		if _, text, named := strings.Cut(message, ": "); warned && named {
			w.add(text)
		}
	}
}

func (w *warnings) add(text string) {
	switch {
	case slices.Contains(w.reported, text):
		w.repeated[text]++
	case len(w.reported) < maxWarnings:
		w.reported = append(w.reported, text)
		w.report(text, 0)
	case !w.limited:
		w.limited = true
		w.report("further warnings are not shown", 0)
	}
}

// flush reports how often warnings were repeated, when the log is complete.
func (w *warnings) flush() {
	for _, text := range w.reported {
		if n := w.repeated[text]; n > 0 {
			w.report(text, n)
		}
	}
}

func (w *warnings) tail() string { return strings.TrimSpace(string(w.end)) }
