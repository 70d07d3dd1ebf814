package slurm

import (
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/atomicfile"
	"github.com/rollout-rl/rollout/services/scheduler/launch"
)

// write writes the files of a job: its beat first, then its environment and its script.
func (p *process) write(c launch.Command) error {
	if err := p.beat(); err != nil {
		return fmt.Errorf("write the beat of the job: %w", err)
	}
	if err := atomicfile.Write(p.base+".env", []byte(variables(c.Env)), 0o600); err != nil {
		return fmt.Errorf("write the environment of the job: %w", err)
	}
	if err := atomicfile.Write(p.base+".sh", []byte(script(c, p.base, p.owner.grace)), 0o600); err != nil {
		return fmt.Errorf("write the script of the job: %w", err)
	}
	return nil
}

var variableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// variables is a file that exports an environment when Bash reads it. The values are secrets, so
// they are neither arguments of a process nor part of the script, which clusters archive. Variables
// that Bash cannot have are left out.
func variables(environ []string) string {
	var out strings.Builder
	for _, variable := range environ {
		if name, value, found := strings.Cut(variable, "="); found && variableName.MatchString(name) {
			out.WriteString("export " + name + "=" + quote(value) + "\n")
		}
	}
	return out.String()
}

// script is the text of the batch script of a worker. Bash runs a trap when `wait` returns.
func script(c launch.Command, base string, grace time.Duration) string {
	quoted := func(words []string) string {
		var out []string
		for _, word := range words {
			out = append(out, quote(word))
		}
		return strings.Join(out, " ")
	}
	in := ""
	if c.Dir != "" {
		in = "cd " + quote(c.Dir) + " || finish \"refused the folder does not exist\"\n"
	}
	return fmt.Sprintf(`#!/bin/bash
# The job of %s. The scheduler removes this file when the job has ended.
base=%s
asked=0 sent=0 worker=
finish() { echo "$1" >"$base.exit.new"; mv "$base.exit.new" "$base.exit"; exit 0; }
ask() { [ -z "$worker" ] || [ $sent = 1 ] || { sent=1; kill -TERM "$worker" 2>/dev/null; }; }
trap 'asked=1; ask' TERM # of Slurm
trap 'asked=2; ask' USR2 # of the scheduler
# Without them the scheduler has given up this job, and may have launched another one.
[ -e "$base.beat" ] && [ -r "$base.env" ] || finish "refused the scheduler has given up this job"
program=%s
[ -n "$(type -P "$program")" ] && [ -f "$(type -P "$program")" ] || finish "refused $(hostname) cannot run $program"
%s# The worker exits when its standard input closes; this pipe stays open as long as the job.
mkfifo "$base.stdin" && exec 3<>"$base.stdin"; rm -f "$base.stdin"
# Its environment is that of the file, and the GPUs of the job.
( set -- "$base.env" ${CUDA_VISIBLE_DEVICES+"CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"}
  unset -f $(compgen -A function)
  unset $(compgen -e)
  . "$1" 2>/dev/null
  [ $# = 1 ] || export "$2"
  exec %s ) <&3 3>&- &
child=$!
sleep 0.2 # a signal between fork and exec would be lost
worker=$child
[ $asked = 0 ] || ask
# Without a new beat of the scheduler the worker stops.
( last= age=0
  while sleep 1; do
    now=$(cat "$base.beat" 2>/dev/null)
    if [ -n "$now" ] && [ "$now" != "$last" ]; then last=$now age=0; else age=$((age+1)); fi
    [ $age -lt %d ] || { kill -TERM "$worker"; sleep 10; kill -KILL "$worker"; }
  done ) 3>&- &
beats=$!
while :; do
  wait "$worker"; code=$?
  kill -0 "$worker" 2>/dev/null || break
done
kill "$beats" 2>/dev/null
finish "$code $asked"
`, strings.Map(printable, c.Worker), quote(base), quote(c.Args[0]), in, quoted(c.Args), int(grace.Seconds()))
}

// printable keeps a comment on one line.
func printable(r rune) rune {
	if r < ' ' {
		return -1
	}
	return r
}

// quote makes one word of a shell.
func quote(word string) string { return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'" }
