package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

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
		fix := meant(command, e.Err.Error())
		if fix == "" {
			fix = fmt.Sprintf("see `%s --help`", command.CommandPath())
		}
		return &exit.Error{Code: exit.Usage, Err: reword(command, e.Err), Fix: fix}
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
	cobraArgument  = regexp.MustCompile(`^unknown command "(.*)" for ".*"$`)
	cobraFlag      = regexp.MustCompile(`^unknown flag: --(.*)$`)
)

// meant suggests what was meant by an argument or a flag that a command does not take; "" without a
// suggestion.
func meant(command *cobra.Command, message string) string {
	if m := cobraArgument.FindStringSubmatch(message); m != nil {
		return meantByArgument(command, m[1])
	}
	m := cobraFlag.FindStringSubmatch(message)
	if m == nil {
		return ""
	}
	_, arguments, _ := strings.Cut(command.Use, " ")
	switch flag := m[1]; {
	case strings.Contains(flag, ".") && command.Flag("set") != nil:
		return fmt.Sprintf("write `--set %s=VALUE`", flag)
	case slices.Contains(strings.FieldsFunc(arguments, func(r rune) bool { return strings.ContainsRune(" []()|.", r) }), strings.ToUpper(flag)):
		return fmt.Sprintf("it is an argument: `%s %s`", command.CommandPath(), arguments)
	default:
		var names []string
		command.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if near := nearest.To(flag, names); near != "" {
			return fmt.Sprintf("did you mean --%s?", near)
		}
	}
	return ""
}

// meantByArgument suggests a flag for an argument of a command without arguments: a configuration,
// a plan, a run, or an override.
func meantByArgument(command *cobra.Command, argument string) string {
	if !command.HasParent() { // the file of a run
		if run, _, err := command.Find([]string{"run"}); err == nil && run != command && filepath.Ext(argument) != "" {
			return meantByArgument(run, argument)
		}
		return ""
	}
	flags := []string{"resume", "run"}
	switch {
	case strings.Contains(argument, "=") && command.Flag("set") != nil:
		return fmt.Sprintf("write `--set %s`", argument)
	case filepath.Ext(argument) == ".toml":
		flags = []string{"config"}
	case filepath.Ext(argument) == ".lock":
		flags = []string{"plan"}
	}
	for _, flag := range flags {
		if command.Flag(flag) != nil {
			return fmt.Sprintf("write `%s --%s %s`", command.CommandPath(), flag, argument)
		}
	}
	return ""
}

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
	if m := cobraArgument.FindStringSubmatch(text); m != nil && command.HasParent() && !command.HasSubCommands() {
		return fmt.Errorf("`%s` takes no arguments, got %q", command.CommandPath(), m[1])
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
