package main

import (
	"strings"

	"github.com/spf13/cobra"
)

const rootLong = `rollout trains language models with reinforcement learning, from a laptop to a cluster.

Write a configuration (TOML), check it, pin it, run it:

  rollout validate --config grpo.toml
  rollout plan --config grpo.toml
  rollout run --plan plan.lock

Commands talk to a control plane. Where --server names none, a local daemon (rolloutd) is started and reused; commands that only
look (status, runs list and show, logs, snapshot list and show) start none, and leave with 69 where none runs; report, completions, export, infer,
audit and replay read the state folder then.

Exit codes: 0 done, 64 the command line is wrong, 65 a configuration, dataset, reward, model or plan is wrong, 66 a file, run or
snapshot is not there, 69 the server can't be reached, 70 the run failed, 73 a file can't be written, 130 interrupted.`

// root builds the tree of commands.
func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:                        "rollout",
		Short:                      "Train language models with reinforcement learning",
		Long:                       rootLong,
		SilenceUsage:               true,
		SilenceErrors:              true,
		SuggestionsMinimumDistance: 2,
		Args:                       cobra.ArbitraryArgs,
		RunE:                       group,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if a.format != formatText && a.format != formatJSON {
				format := a.format
				a.format = formatText
				return usage("invalid argument %q for --format: it is text or json", format)
			}
			return nil
		},
	}
	root.DisableAutoGenTag = true
	flags := root.PersistentFlags()
	flags.StringVar(&a.format, "format", formatText, "how answers are written: `text` or json (one document, or a line each where they stream)")
	flags.StringVar(&a.server, "server", a.env("ROLLOUT_SERVER"), "`address` (host:port) of a running control plane; empty: a local one")
	flags.StringVar(&a.consul, "consul", a.env("ROLLOUT_CONSUL"), "`address` (host:port or URL) of a Consul agent that knows the services, where they run apart; its ACL token is $CONSUL_HTTP_TOKEN")
	flags.StringVar(&a.stateDir, "state-dir", "", "`folder` of the local control plane (default: $ROLLOUT_STATE_DIR, else ~/.local/state/rollout)")
	flags.StringVar(&a.tokenFile, "token-file", "", "`file` that holds the token of --server (default: token in the state folder)")
	flags.StringVar(&a.apiKey, "api-key", "", "`reference` to an API key, env:NAME or file:PATH (default: $ROLLOUT_API_KEY, else the token)")
	flags.StringVar(&a.certs.CA, "ca-file", a.env("ROLLOUT_CA_FILE"), "`file` (PEM) of the authority that the server's certificate is checked against")
	flags.StringVar(&a.certs.Cert, "cert-file", a.env("ROLLOUT_CERT_FILE"), "`file` (PEM) of the certificate to show to the server")
	flags.StringVar(&a.certs.Key, "key-file", a.env("ROLLOUT_KEY_FILE"), "`file` (PEM, mode 0600) of its key")
	flags.BoolVar(&a.private, "insecure", false, "call a server beyond this machine in plain text: only on a private network")
	_ = root.RegisterFlagCompletionFunc("format", cobra.FixedCompletions([]string{formatText, formatJSON}, cobra.ShellCompDirectiveNoFileComp))
	root.AddGroup(
		&cobra.Group{ID: "train", Title: "Train:"},
		&cobra.Group{ID: "watch", Title: "Watch and use:"},
		&cobra.Group{ID: "house", Title: "Keep house:"},
	)
	add := func(id string, commands ...*cobra.Command) {
		for _, command := range commands {
			command.GroupID = id
			root.AddCommand(command)
		}
	}
	add("train", a.validateCommand(), a.planCommand(), a.runCommand(), a.trainCommand())
	add("watch", a.runsCommand(), a.logsCommand(), a.statusCommand(), a.chatCommand(), a.completionsCommand(), a.reportCommand(), a.exportCommand(), a.inferCommand(), a.auditCommand(), a.replayCommand())
	add("house", a.snapshotCommand(), a.daemonCommand(), a.doctorCommand(), a.certsCommand(), a.keysCommand(), a.versionCommand())
	root.AddCommand(a.docsCommand())
	root.SetHelpCommandGroupID("house")
	root.SetCompletionCommandGroupID("house")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	for _, command := range root.Commands() {
		command.DisableAutoGenTag = true
	}
	return root
}

// group is what a command does that only holds others: it shows its help, or says which one was meant.
func group(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	message := "unknown command %q for %q"
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return usage(message+"; did you mean %s?", args[0], cmd.CommandPath(), "`"+strings.Join(near, "` or `")+"`")
	}
	return usage(message, args[0], cmd.CommandPath())
}

// parent makes a command that only holds others.
func parent(use, short string, children ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: group, SuggestionsMinimumDistance: 2,
	}
	cmd.AddCommand(children...)
	return cmd
}
