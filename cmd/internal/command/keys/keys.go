// Package keys has the commands `rollout keys ...`.
package keys

import (
	"fmt"
	"io"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/apikey"
)

const keysLong = `Make, list and revoke API keys: with them people and their programs call a control plane, in place of its own token.

A key has a scope: read looks at everything; submit also plans, starts and steers runs, and samples their policies; admin also deletes.
It is shown once, and only its hash is kept, in a file that every process of the mesh reads again when it changes. Who uses one puts it
into ROLLOUT_API_KEY, or sends it to the OpenAI-compatible endpoint as a bearer token.`

// Command returns `rollout keys`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("keys", "Make, list and revoke API keys", createCommand(env), listCommand(env), revokeCommand(env))
	cmd.Long = keysLong
	cmd.Example = `  rollout keys create ada --scope submit
  rollout keys list
  rollout keys revoke ada`
	return cmd
}

// fileFlag adds the flag that all of them have.
func fileFlag(env *cli.Env, cmd *cobra.Command) func() (apikey.Keep, error) {
	file := cmd.Flags().String("file", "", "`file` of the keys (default: that of the local daemon, else api-keys.json in the state folder)")
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
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make a key; it is shown once", Args: cobra.ExactArgs(1),
		Long:    "Make a key for NAME, and print it. It is not to be had again: keep it where secrets are kept.",
		Example: "  rollout keys create ada --scope submit\n  export ROLLOUT_API_KEY=$(rollout keys create ci --scope read)",
	}
	keep := fileFlag(env, cmd)
	cmd.Flags().StringVar(&scope, "scope", string(apikey.Read), "what it may do: `read`, submit or admin")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		k, err := keep()
		if err != nil {
			return err
		}
		key, err := k.Create(args[0], apikey.Scope(scope), env.Now())
		if err != nil {
			return err
		}
		if env.JSON() {
			return output.Value(env.Stdout, map[string]string{"name": args[0], "scope": scope, "key": key})
		}
		env.Note("made the key %s with the scope %s, in %s; this is the only time that it is shown", args[0], scope, k.Path)
		_, err = fmt.Fprintln(env.Stdout, key)
		return err
	}
	return cmd
}

func listCommand(env *cli.Env) *cobra.Command {
	cmd := &cobra.Command{Use: "list", Short: "List keys: names, scopes and ages", Example: "  rollout keys list\n  rollout keys list --format json", Args: cobra.NoArgs}
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
				rows = append(rows, map[string]any{"name": r.Name, "scope": r.Scope, "created": r.Created})
			}
			return output.Value(env.Stdout, map[string]any{"file": k.Path, "keys": rows})
		}
		if len(list) == 0 {
			_, err := fmt.Fprintf(env.Stdout, "no keys in %s\n", k.Path)
			return err
		}
		s := env.Style()
		var table output.Table
		table.Row(s.Bold("NAME"), s.Bold("SCOPE"), s.Bold("CREATED"))
		for _, r := range list {
			table.Row(r.Name, string(r.Scope), env.Time(r.Created))
		}
		_, err = io.WriteString(env.Stdout, table.String())
		return err
	}
	return cmd
}

func revokeCommand(env *cli.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use: "revoke NAME", Short: "Take a key out of force, from the next call on", Example: "  rollout keys revoke ada", Args: cobra.ExactArgs(1),
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
