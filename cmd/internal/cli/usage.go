package cli

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/nearest"
)

// UsageError is a mistake in the command line.
type UsageError struct{ error }

// Usage returns a UsageError.
func Usage(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// FlagError makes a usage error of an error that the parser of flags returned.
func FlagError(_ *cobra.Command, err error) error { return &UsageError{err} }

// Explain returns what is printed for an error of command, with its exit code.
func Explain(command *cobra.Command, err error) *exit.Error {
	e := exit.From(err)
	var usage *UsageError
	if e.Err != nil && (errors.As(err, &usage) || isCobraUsage(err)) {
		return &exit.Error{Code: exit.Usage, Err: reword(command, e.Err), Fix: fmt.Sprintf("see `%s --help`", command.CommandPath())}
	}
	return e
}

// isCobraUsage recognizes usage errors that cobra makes itself: it gives them no type.
func isCobraUsage(err error) bool {
	text := err.Error()
	return slices.ContainsFunc([]string{
		"unknown command", "unknown flag", "unknown shorthand", "flag needs an argument", "invalid argument", "required flag",
		"accepts ", "requires at least", "if any flags in the group", "at least one of the flags", "bad flag syntax",
	}, func(prefix string) bool { return strings.HasPrefix(text, prefix) })
}

// Messages of cobra about groups of flags and the number of arguments.
var (
	cobraExclusive = regexp.MustCompile(`^if any flags in the group \[.*\] are set none of the others can be; \[(.*)\] were all set$`)
	cobraOneOf     = regexp.MustCompile(`^at least one of the flags in the group \[(.*)\] is required$`)
	cobraCount     = regexp.MustCompile(`^accepts .*arg\(s\), received (\d+)$`)
)

// reword replaces messages of cobra with ones that read like those of the commands.
func reword(command *cobra.Command, err error) error {
	text := err.Error()
	if m := cobraExclusive.FindStringSubmatch(text); m != nil {
		return errors.New(flagList(m[1], "and") + " are mutually exclusive: use one of them")
	}
	if m := cobraOneOf.FindStringSubmatch(text); m != nil {
		return errors.New("one of " + flagList(m[1], "or") + " is required")
	}
	if m := cobraCount.FindStringSubmatch(text); m != nil {
		given := map[string]string{"0": "no argument", "1": "1 argument"}[m[1]]
		if given == "" {
			given = m[1] + " arguments"
		}
		_, takes, _ := strings.Cut(command.Use, " ")
		return fmt.Errorf("`%s %s` was called with %s", command.CommandPath(), takes, given)
	}
	return err
}

// flagList joins flag names: "--a, --b and --c".
func flagList(names, last string) string {
	flags := strings.Fields(names)
	for i, name := range flags {
		flags[i] = "--" + name
	}
	end := len(flags) - 1
	return strings.Join(flags[:end], ", ") + " " + last + " " + flags[end]
}

// OneOf returns a usage error for the first of names that is not in allowed. What follows a slash
// names one worker and is not compared.
func OneOf(flag string, names, allowed []string) error {
	for _, name := range names {
		head, _, _ := strings.Cut(name, "/")
		if slices.Contains(allowed, head) {
			continue
		}
		text := "invalid argument %q for --%s"
		if near := nearest.To(name, allowed); near != "" {
			return Usage(text+"; did you mean `%s`? Must be one of %s", name, flag, near, strings.Join(allowed, ", "))
		}
		return Usage(text+": must be one of %s", name, flag, strings.Join(allowed, ", "))
	}
	return nil
}

// Group makes a command that only holds other commands.
func Group(use, short string, children ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: ShowHelp, SuggestionsMinimumDistance: 2,
	}
	cmd.AddCommand(children...)
	return cmd
}

// ShowHelp prints the help of a command that only holds others. Arguments are a mistyped command.
func ShowHelp(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	message := "unknown command %q for %q"
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return Usage(message+"; did you mean %s?", args[0], cmd.CommandPath(), "`"+strings.Join(near, "` or `")+"`")
	}
	return Usage(message, args[0], cmd.CommandPath())
}
