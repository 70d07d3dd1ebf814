// Package process has the commands `rollout process ...`, which save and restore processes of this
// host without a control plane.
package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/program"
	"github.com/rollout-rl/rollout/libs/checkpoint"
	"github.com/rollout-rl/rollout/libs/checkpoint/criu"
	"github.com/rollout-rl/rollout/libs/exit"
)

// Checkpointer returns that of this host.
func Checkpointer() checkpoint.Checkpointer {
	found, _ := program.Find("criu") // a call reports that it is missing
	return criu.New(found, "/proc/self/exe", "process", "init")
}

// Command returns `rollout process`.
func Command(env *cli.Env) *cobra.Command {
	return cli.Group("process", "Save and restore processes of this host", dumpCommand(env), restoreCommand(env), initCommand())
}

func initCommand() *cobra.Command {
	return &cobra.Command{
		Use: "init", Short: "The first process of restored ones", Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return code(criu.Init()) },
	}
}

func code(n int) error {
	if n == 0 {
		return nil
	}
	return exit.Silent(n)
}

// explained gives an error of a checkpoint its exit code and its fix.
func explained(err error) error {
	var e *checkpoint.Error
	if !errors.As(err, &e) {
		return err
	}
	codes := map[string]int{
		checkpoint.ReasonUnavailable: exit.Unavailable, checkpoint.ReasonNotFound: exit.NoInput, checkpoint.ReasonExists: exit.CannotMake,
	}
	number, ok := codes[e.Reason]
	if !ok {
		number = exit.Data
	}
	return &exit.Error{Code: number, Reason: e.Reason, Fix: e.Fix, Err: e}
}

func dumpCommand(env *cli.Env) *cobra.Command {
	var to string
	var keep bool
	cmd := &cobra.Command{
		Use:   "dump PID --to FOLDER",
		Short: "Save a process and its descendants to a folder",
		Long: "Save a process and its descendants to a folder, with their memory and open files. They end, unless --keep is given.\n\n" +
			"This needs CRIU and root; `rollout doctor` shows whether this host can. A process in a sandbox is refused, because not all of its\n" +
			"limits would be in force after a restore. The folder holds the memory of the process, secrets included: only root can read it.",
		Example: "  rollout process dump 4711 --to saved\n  rollout process dump 4711 --to saved --keep",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			pid, err := strconv.Atoi(args[0])
			if err != nil || pid <= 0 {
				return cli.Usage("invalid argument %q: must be the id of a process", args[0])
			}
			if to == "" {
				return cli.Usage("name the new folder with --to")
			}
			image, err := Checkpointer().Dump(cmd.Context(), pid, to, keep)
			if err != nil {
				return explained(err)
			}
			if env.JSON() {
				return output.Value(env.Stdout, image)
			}
			var bytes int64
			for _, f := range image.Files {
				bytes += f.Bytes
			}
			fmt.Fprintf(env.Stdout, "saved %d processes, %s, to %s\n", len(image.Processes), output.Bytes(uint64(bytes)), to)
			for _, s := range image.Streams {
				fmt.Fprintf(env.Stdout, "   a restore connects descriptors %v, a %s\n", s.Descriptors, s.Kind)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "the new `folder`")
	cmd.Flags().BoolVar(&keep, "keep", false, "let the processes continue")
	return cmd
}

func restoreCommand(env *cli.Env) *cobra.Command {
	var network string
	var connect []string
	var ready int
	cmd := &cobra.Command{
		Use:   "restore FOLDER",
		Short: "Continue the processes of a folder, and wait for them",
		Long: "Continue the processes of a folder, which may be restored several times, and wait until the first one ends. The exit code is that\n" +
			"of the first process. They end when this command ends.\n\n" +
			"Descriptors that were connected to another process are connected to those of this command: 0, 1 and 2 to the same number, others\n" +
			"as --connect says. TCP connections are closed. The files that the processes have open must exist here, at the same paths.",
		Example: "  rollout process restore saved\n  rollout process restore saved --network /run/netns/other\n  rollout process restore saved --connect 3=0",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			streams := map[string]*os.File{}
			defer runtime.KeepAlive(streams) // a file that is collected closes its descriptor
			restored, err := restore(cmd, args[0], network, connect, streams)
			if ready >= 0 {
				if e := report(ready, restored, err); e != nil {
					return e
				}
			}
			if err != nil {
				return explained(err)
			}
			interrupts, stop := env.Signals()
			defer stop()
			go func() {
				if _, ok := <-interrupts; ok {
					restored.Kill()
				}
			}()
			return code(restored.Wait())
		},
	}
	cmd.Flags().StringVar(&network, "network", "", "the network namespace to continue in: a `file` such as /run/netns/NAME")
	cmd.Flags().StringArrayVar(&connect, "connect", nil, "connect descriptor THEIRS of the first process to OURS of this command: `THEIRS=OURS` (repeatable)")
	cmd.Flags().IntVar(&ready, "ready-fd", -1, "write one JSON line to this `descriptor`: {\"pid\": N} when the processes run, or {\"error\": ...}")
	return cmd
}

// restore continues an image. It adds the files that the image is connected to to streams, which
// the caller keeps while the processes run.
func restore(cmd *cobra.Command, dir, network string, connect []string, streams map[string]*os.File) (checkpoint.Process, error) {
	image, err := checkpoint.Read(dir)
	if err != nil {
		return nil, err
	}
	to := map[int]int{0: 0, 1: 1, 2: 2}
	for _, pair := range connect {
		theirs, ours, _ := strings.Cut(pair, "=")
		from, e1 := strconv.Atoi(theirs)
		into, e2 := strconv.Atoi(ours)
		if e1 != nil || e2 != nil || from < 0 || into < 0 {
			return nil, cli.Usage("invalid argument %q for --connect: must be THEIRS=OURS, two numbers", pair)
		}
		to[from] = into
	}
	for theirs, ours := range to {
		if s, ok := image.Stream(theirs); ok {
			streams[s.ID] = inherited(ours)
		}
	}
	return Checkpointer().Restore(cmd.Context(), dir, checkpoint.Restore{Streams: streams, Network: network})
}

// inherited returns a descriptor of this command as a file. The standard ones are the variables of
// os, which this command still writes to, and which are never collected.
func inherited(descriptor int) *os.File {
	for _, standard := range []*os.File{os.Stdin, os.Stdout, os.Stderr} {
		if standard.Fd() == uintptr(descriptor) {
			return standard
		}
	}
	return os.NewFile(uintptr(descriptor), "descriptor "+strconv.Itoa(descriptor))
}

// report writes the outcome of a restore to a descriptor.
func report(descriptor int, p checkpoint.Process, err error) error {
	value := map[string]any{}
	var typed *checkpoint.Error
	switch {
	case err == nil:
		value["pid"] = p.PID()
	case errors.As(err, &typed):
		value["error"] = typed
	default:
		value["error"] = checkpoint.Fail(checkpoint.ReasonRestore, "", "%v", err)
	}
	f := os.NewFile(uintptr(descriptor), "ready")
	if f == nil {
		return cli.Usage("invalid argument %d for --ready-fd: it is not open", descriptor)
	}
	return errors.Join(json.NewEncoder(f).Encode(value), f.Close())
}
