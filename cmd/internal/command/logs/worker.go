package logs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/live"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
)

func workerCommand(env *cli.Env) *cobra.Command {
	var lines uint32
	var follow bool
	cmd := &cobra.Command{
		Use:   "worker RUN [WORKER]",
		Short: "Show the output of a worker, such as the prints of a reward",
		Long: `Show the output of a worker, such as the prints of a reward. Without WORKER, list the workers. Rewards run in the inference
workers. ` + cli.RunHelp + `

The log of a worker is in the folder of the run. It is rotated (worker.log_bytes of rolloutd), and repeated lines are dropped and
counted (worker.log_lines_per_second); the last lines before an exit are always written.`,
		Example: `  rollout logs worker addition-grpo
  rollout logs worker addition-grpo inference-0 --follow
  rollout logs worker addition-grpo learner-0 --lines 50`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				got, err := r.Run(ctx, args[0])
				if err != nil {
					return err
				}
				run := got.GetRun()
				folder := filepath.Join(run.GetDirectory(), "workers")
				if len(args) == 1 {
					return listWorkers(env, folder, run.GetName())
				}
				if !slices.Contains(workersOf(folder), args[1]) {
					return unknownWorker(folder, run.GetName(), args[1])
				}
				log := &workerLog{path: filepath.Join(folder, args[1]+".log"), out: env.Stdout}
				defer log.close()
				services, running := r.(record.Services)
				if !follow || !running || live.Over(run) {
					return log.show(int(lines))
				}
				ctx, stop := context.WithCancel(ctx)
				defer stop()
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					if live.Watch(ctx, services.Client, run.GetRunId(), func(*runv1.RunStatus) error { return nil }) == nil {
						select {
						case <-time.After(lateEvents): // the workers exit a moment later
						case <-ctx.Done():
						}
					}
				}()
				defer func() { stop(); <-ended }()
				return log.follow(ctx, int(lines), ended)
			})
		},
	}
	cmd.Flags().Uint32VarP(&lines, "lines", "n", 0, "`number` of lines that are there, the newest; 0: all")
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for new lines until the run ends")
	return cmd
}

// workersOf lists the workers whose logs are in a folder.
func workersOf(folder string) []string {
	paths, _ := filepath.Glob(filepath.Join(folder, "*.log")) // the pattern is valid
	var names []string
	for _, path := range paths {
		names = append(names, strings.TrimSuffix(filepath.Base(path), ".log"))
	}
	slices.Sort(names)
	return names
}

func listWorkers(env *cli.Env, folder, run string) error {
	names := workersOf(folder)
	if len(names) == 0 {
		env.Note("run %s has no logs of workers in %s on this host", run, folder)
	}
	for _, name := range names {
		if _, err := fmt.Fprintln(env.Stdout, name); err != nil {
			return err
		}
	}
	return nil
}

func unknownWorker(folder, run, name string) error {
	names := workersOf(folder)
	if len(names) == 0 {
		return cli.Usage("run %s has no logs of workers in %s on this host; run the command on the host of the scheduler", run, folder)
	}
	return cli.Usage("run %s has no worker %q: its workers are %s", run, name, strings.Join(names, ", "))
}

// followEvery is how often a followed log is read.
const followEvery = 200 * time.Millisecond

// workerLog prints the log of a worker: PATH.1, the older part, then PATH.
type workerLog struct {
	path string
	out  io.Writer

	file *os.File // the part that was read last
}

// show prints the newest lines of both parts; 0: all. The caller closes the log.
func (l *workerLog) show(lines int) error {
	var text []byte
	for _, path := range []string{l.path + ".1", l.path} {
		file, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		l.close()
		l.file = file
		part, err := io.ReadAll(file)
		if err != nil {
			return err
		}
		text = append(text, part...)
	}
	_, err := l.out.Write(newest(text, lines))
	return err
}

// newest is the last lines of a text; 0: all.
func newest(text []byte, lines int) []byte {
	if lines == 0 {
		return text
	}
	at := len(bytes.TrimSuffix(text, []byte{'\n'}))
	for ; lines > 0 && at >= 0; lines-- {
		at = bytes.LastIndexByte(text[:at], '\n')
	}
	return text[at+1:]
}

// follow prints the newest lines, then new ones until ended is closed or ctx ends. It continues in
// the next file when the log is rotated.
func (l *workerLog) follow(ctx context.Context, lines int, ended <-chan struct{}) error {
	if err := l.show(lines); err != nil {
		return err
	}
	ticker := time.NewTicker(followEvery)
	defer ticker.Stop()
	for {
		over := false
		select {
		case <-ctx.Done():
			return nil
		case <-ended:
			over = true
		case <-ticker.C:
		}
		if err := l.read(); err != nil || over {
			return err
		}
	}
}

// read prints what was written since the last read.
func (l *workerLog) read() error {
	for {
		if _, err := io.Copy(l.out, l.file); err != nil {
			return err
		}
		next, err := os.Open(l.path)
		if errors.Is(err, os.ErrNotExist) { // it is being rotated
			return nil
		}
		if err != nil {
			return err
		}
		was, errWas := l.file.Stat()
		is, errIs := next.Stat()
		if err := errors.Join(errWas, errIs); err != nil || os.SameFile(was, is) {
			return errors.Join(err, next.Close(), l.rewind(is))
		}
		if _, err := io.Copy(l.out, l.file); err != nil { // written after the first copy and before the rotation
			return errors.Join(err, next.Close())
		}
		l.close()
		l.file = next
	}
}

// rewind starts again at the beginning of a file that was truncated.
func (l *workerLog) rewind(info os.FileInfo) error {
	at, err := l.file.Seek(0, io.SeekCurrent)
	if err == nil && info != nil && info.Size() < at {
		_, err = l.file.Seek(0, io.SeekStart)
	}
	return err
}

func (l *workerLog) close() {
	if l.file != nil {
		_ = l.file.Close()
		l.file = nil
	}
}
