// Package keys has the commands `rollout keys ...`.
package keys

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/apikey"
)

const keysLong = `Manage API keys, with which people and programs call a control plane instead of with its token.

A key has a scope: sample can sample from policies, as agents do; session can also end sessions with a reward, which trains on them;
read can read everything; submit can do all of that, and plan, start and control runs; admin can also delete. A key may expire, and
may have limits on the completions that it requests. A key is shown once; only its hash is stored, in a file that services reload
when it changes. To use a key, set ROLLOUT_API_KEY, or send it to the OpenAI-compatible endpoint as a bearer token.`

// Command returns `rollout keys`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("keys", "Manage API keys", createCommand(env), listCommand(env), revokeCommand(env))
	cmd.Long = keysLong
	cmd.Example = `  rollout keys create ada --scope submit
  rollout keys create agent --scope session --expires 720h --requests-per-minute 600
  rollout keys list
  rollout keys revoke ada`
	return cmd
}

// fileFlag adds --file and returns a function that opens the file.
func fileFlag(env *cli.Env, cmd *cobra.Command) func() (apikey.Keep, error) {
	file := cmd.Flags().String("file", "", "`file` of the keys (default: the file of the local daemon, else api-keys.json in the state folder)")
	return func() (apikey.Keep, error) {
		if *file != "" {
			path, err := filepath.Abs(*file)
			return apikey.Keep{Path: path}, err
		}
		dir, err := env.Plane.StateDir()
		if err != nil {
			return apikey.Keep{}, err
		}
		if info, err := daemon.Find(dir); err == nil && info != nil && info.KeysFile != "" {
			return apikey.Keep{Path: info.KeysFile}, nil
		}
		return apikey.Keep{Path: filepath.Join(dir, "api-keys.json")}, nil
	}
}

func createCommand(env *cli.Env) *cobra.Command {
	var scope string
	var expires time.Duration
	var limits apikey.Limits
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Create a key", Args: cobra.ExactArgs(1),
		Long:    "Create a key for NAME and print it. It is shown only once: store it as a secret.",
		Example: "  rollout keys create ada --scope submit\n  export ROLLOUT_API_KEY=$(rollout keys create ci --scope read)",
	}
	keep := fileFlag(env, cmd)
	cmd.Flags().StringVar(&scope, "scope", string(apikey.Read), "`scope` of the key: sample, session, read, submit or admin")
	cmd.Flags().DurationVar(&expires, "expires", 0, "`duration` after which the key expires, such as 720h (default: never)")
	cmd.Flags().IntVar(&limits.RequestsPerMinute, "requests-per-minute", 0, "`number` of completions that the key may request a minute (default: any)")
	cmd.Flags().IntVar(&limits.TokensPerMinute, "tokens-per-minute", 0, "`number` of tokens of prompts and completions a minute (default: any)")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		k, err := keep()
		if err != nil {
			return err
		}
		if cmd.Flags().Changed("expires") {
			end := env.Now().Add(expires)
			limits.Expires = &end
		}
		key, err := k.Create(args[0], apikey.Scope(scope), limits, env.Now())
		if err != nil {
			return err
		}
		if env.JSON() {
			return output.Value(env.Stdout, map[string]string{"name": args[0], "scope": scope, "key": key})
		}
		env.Note("created the key %s with the scope %s in %s; it is shown only once", args[0], scope, k.Path)
		_, err = fmt.Fprintln(env.Stdout, key)
		return err
	}
	return cmd
}

func listCommand(env *cli.Env) *cobra.Command {
	cmd := &cobra.Command{Use: "list", Short: "List keys", Example: "  rollout keys list\n  rollout keys list --format json", Args: cobra.NoArgs}
	keep := fileFlag(env, cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		k, err := keep()
		if err != nil {
			return err
		}
		list, err := k.List()
		if err != nil {
			return err
		}
		if env.JSON() {
			rows := []map[string]any{}
			for _, r := range list {
				row := map[string]any{"name": r.Name, "scope": r.Scope, "created": r.Created}
				if r.Expires != nil {
					row["expires"] = *r.Expires
				}
				if r.RequestsPerMinute > 0 {
					row["requests_per_minute"] = r.RequestsPerMinute
				}
				if r.TokensPerMinute > 0 {
					row["tokens_per_minute"] = r.TokensPerMinute
				}
				rows = append(rows, row)
			}
			return output.Value(env.Stdout, map[string]any{"file": k.Path, "keys": rows})
		}
		if len(list) == 0 {
			_, err := fmt.Fprintf(env.Stdout, "no keys in %s\n", k.Path)
			return err
		}
		s := env.Style()
		var table output.Table
		table.Row(s.Bold("NAME"), s.Bold("SCOPE"), s.Bold("CREATED"), s.Bold("EXPIRES"), s.Bold("PER MINUTE"))
		for _, r := range list {
			expires := "never"
			if r.Expires != nil {
				expires = env.Time(*r.Expires)
			}
			table.Row(r.Name, string(r.Scope), env.Time(r.Created), expires, perMinute(r.Limits))
		}
		_, err = io.WriteString(env.Stdout, table.String())
		return err
	}
	return cmd
}

// perMinute returns the limits as text.
func perMinute(l apikey.Limits) string {
	var parts []string
	if l.RequestsPerMinute > 0 {
		parts = append(parts, fmt.Sprintf("%d requests", l.RequestsPerMinute))
	}
	if l.TokensPerMinute > 0 {
		parts = append(parts, fmt.Sprintf("%d tokens", l.TokensPerMinute))
	}
	return cmp.Or(strings.Join(parts, ", "), "any")
}

func revokeCommand(env *cli.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use: "revoke NAME", Short: "Revoke a key", Example: "  rollout keys revoke ada", Args: cobra.ExactArgs(1),
	}
	keep := fileFlag(env, cmd)
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		k, err := keep()
		if err != nil {
			return err
		}
		if err := k.Revoke(args[0]); err != nil {
			return err
		}
		if env.JSON() {
			return output.Value(env.Stdout, map[string]string{"revoked": args[0]})
		}
		_, err = fmt.Fprintf(env.Stdout, "revoked the key %s\n", args[0])
		return err
	}
	return cmd
}
