package main

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
)

// usageError is a mistake in the command line that a command found itself.
type usageError struct{ error }

func usage(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// isCobraUsage recognises the errors that cobra makes itself; it gives them no type.
func isCobraUsage(err error) bool {
	text := err.Error()
	for _, head := range []string{
		"unknown command", "unknown flag", "unknown shorthand", "flag needs an argument", "invalid argument", "required flag",
		"accepts ", "requires at least", "if any flags in the group", "at least one of the flags", "bad flag syntax",
	} {
		if strings.HasPrefix(text, head) {
			return true
		}
	}
	return false
}

// What cobra says of groups of flags and of the number of arguments.
var (
	cobraTogether = regexp.MustCompile(`^if any flags in the group \[.*\] are set none of the others can be; \[(.*)\] were all set$`)
	cobraOneOf    = regexp.MustCompile(`^at least one of the flags in the group \[(.*)\] is required$`)
	cobraCount    = regexp.MustCompile(`^accepts .*arg\(s\), received (\d+)$`)
)

// ownWords says what cobra says of a command line as the other messages do.
func ownWords(command *cobra.Command, err error) error {
	text := err.Error()
	if m := cobraTogether.FindStringSubmatch(text); m != nil {
		return errors.New(flagList(m[1], "and") + " exclude each other: give one of them")
	}
	if m := cobraOneOf.FindStringSubmatch(text); m != nil {
		return errors.New("name what it is about with " + flagList(m[1], "or"))
	}
	if m := cobraCount.FindStringSubmatch(text); m != nil {
		given := map[string]string{"0": "no argument", "1": "1 argument"}[m[1]]
		if given == "" {
			given = m[1] + " arguments"
		}
		_, takes, _ := strings.Cut(command.Use, " ")
		return fmt.Errorf("`%s %s` was given %s", command.CommandPath(), takes, given)
	}
	return err
}

// flagList is a list of flags that cobra names, as people write it.
func flagList(names, last string) string {
	flags := strings.Fields(names)
	for i, name := range flags {
		flags[i] = "--" + name
	}
	end := len(flags) - 1
	return strings.Join(flags[:end], ", ") + " " + last + " " + flags[end]
}
