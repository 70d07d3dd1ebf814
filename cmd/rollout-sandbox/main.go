// Command rollout-sandbox runs commands in boxes that contain them.
//
//	rollout-sandbox run -- python3 -c 'print(1)'     one command, with the default limits
//	rollout-sandbox run --spec spec.json             one command as JSON describes it
//	rollout-sandbox probe [--format json]            how this host enforces each limit
//	rollout-sandbox serve                            boxes for one client, over stdin and stdout
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"text/tabwriter"

	"github.com/rollout-rl/rollout/libs/sandbox"
)

// version is set by the linker.
var version = "unknown"

// Exit codes, by sysexits(3).
const (
	usage       = 64
	unavailable = 69
	software    = 70
)

const help = `rollout-sandbox runs commands in boxes that contain them.

  rollout-sandbox run -- python3 -c 'print(1)'   run one command with the default limits
  rollout-sandbox run --spec FILE|-|JSON         run one command as a JSON object describes it
  rollout-sandbox probe [--format text|json]     show how this host enforces each limit
  rollout-sandbox serve                          serve boxes over standard input and output
  rollout-sandbox version                        print the version

docs/tools.md documents the JSON.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(errs, help)
		return usage
	}
	switch args[0] {
	case "init":
		return sandbox.Init()
	case "stage":
		return sandbox.Stage()
	case "run", "probe", "serve":
		if err := sandbox.KeepFiles(); err != nil {
			return refuse(out, err)
		}
	}
	switch args[0] {
	case "run":
		return one(ctx, args[1:], in, out, errs)
	case "probe":
		return probe(args[1:], out, errs)
	case "serve":
		if err := sandbox.Serve(ctx, host(), in, out); err != nil {
			fmt.Fprintln(errs, "rollout-sandbox:", err)
			return software
		}
		return 0
	case "version", "--version":
		fmt.Fprintln(out, version)
		return 0
	case "help", "--help", "-h":
		fmt.Fprint(out, help)
		return 0
	}
	fmt.Fprintf(errs, "rollout-sandbox: %q is not a command; use run, probe, serve, or version\n", args[0])
	return usage
}

func host() *sandbox.Host { return sandbox.NewHost("/proc/self/exe") }

// one runs one command and prints its result, or a typed error, as JSON.
func one(ctx context.Context, args []string, in io.Reader, out, errs io.Writer) int {
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	flags.SetOutput(errs)
	from := flags.String("spec", "", "the command and its box: a file, - for standard input, or a JSON object")
	if err := flags.Parse(args); err != nil {
		return usage
	}
	var job sandbox.Job
	if err := readJob(*from, in, &job); err != nil {
		return refuse(out, &sandbox.Error{Reason: sandbox.ReasonSpec, Message: "the spec can't be read: " + err.Error(), Fix: "see docs/tools.md for its fields"})
	}
	if flags.NArg() > 0 {
		job.Argv = flags.Args()
	}
	result, err := host().Run(ctx, job.Spec, job.Command)
	if err != nil {
		return refuse(out, err)
	}
	return printJSON(out, result)
}

func readJob(from string, in io.Reader, job *sandbox.Job) error {
	var raw []byte
	var err error
	switch {
	case from == "":
		return nil
	case from == "-":
		raw, err = io.ReadAll(in)
	case from[0] == '{':
		raw = []byte(from)
	default:
		raw, err = os.ReadFile(from)
	}
	if err != nil {
		return err
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	return decoder.Decode(job)
}

func refuse(out io.Writer, err error) int {
	var typed *sandbox.Error
	if !errors.As(err, &typed) {
		typed = &sandbox.Error{Reason: sandbox.ReasonStart, Message: err.Error()}
	}
	printJSON(out, map[string]any{"error": typed})
	if typed.Reason == sandbox.ReasonSpec {
		return usage
	}
	return unavailable
}

func printJSON(out io.Writer, value any) int {
	encoder := json.NewEncoder(out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if encoder.Encode(value) != nil {
		return software
	}
	return 0
}

func probe(args []string, out, errs io.Writer) int {
	flags := flag.NewFlagSet("probe", flag.ContinueOnError)
	flags.SetOutput(errs)
	format := flags.String("format", "text", "text or json")
	if err := flags.Parse(args); err != nil {
		return usage
	}
	report := host().Probe()
	switch *format {
	case "json":
		printJSON(out, report)
	case "text":
		printReport(out, report)
	default:
		fmt.Fprintf(errs, "rollout-sandbox: --format: %q is not text or json\n", *format)
		return usage
	}
	if !report.OK {
		return unavailable
	}
	return 0
}

func printReport(out io.Writer, report sandbox.Report) {
	if report.Error != nil {
		fmt.Fprintf(out, "sandboxes are not available: %s\n", report.Error)
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, e := range append(report.Limits, report.Boundary...) {
		note := e.Why
		if note != "" && e.Fix != "" {
			note += "; " + e.Fix
		}
		fmt.Fprintf(table, "%s\t%s\t%s\n", e.Name, e.By, note)
	}
	table.Flush()
}
