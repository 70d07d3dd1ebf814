// Package keys has the commands `rollout keys ...`.
package keys

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/paging"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
)

const keysLong = `Manage API keys, with which people and programs call a control plane instead of with its token.

A key has a scope: sample can sample from policies, as agents do; session can also end sessions with a reward, which trains on them;
read can read everything; submit can do all of that, and plan, start and control runs; admin can also delete, and manage keys. A key
belongs to a project, and sees its runs, sessions, snapshots and keys only. A key may expire, and may have limits on the completions that it requests, which each gateway process counts alone. A key is shown once; only its
hash is stored, in the database of the gateway. Every process accepts a new key at once, and refuses a revoked one about a second later.
To use a key, set ROLLOUT_API_KEY, or send it to the OpenAI-compatible endpoint as a bearer token.`

// Command returns `rollout keys`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("keys", "Manage API keys", createCommand(env), listCommand(env), revokeCommand(env))
	cmd.Long = keysLong
	cmd.Example = `  rollout keys create ada --scope submit
  rollout keys create agent --scope session --expires 720h --requests-per-minute 600
  rollout keys create ci --scope read --project math
  rollout keys list
  rollout keys revoke ada`
	return cmd
}

func createCommand(env *cli.Env) *cobra.Command {
	req := &keyv1.CreateApiKeyRequest{}
	var expires time.Duration
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Create a key", Args: cobra.ExactArgs(1),
		Long:    "Create a key for NAME and print it. It is shown only once: store it as a secret.",
		Example: "  rollout keys create ada --scope submit\n  export ROLLOUT_API_KEY=$(rollout keys create ci --scope read)",
	}
	cmd.Flags().StringVar(&req.Scope, "scope", "read", "`scope` of the key: sample, session, read, submit or admin")
	cmd.Flags().StringVar(&req.Project, "project", "", "`project` whose runs, sessions and snapshots the key sees (default: the default project)")
	cmd.Flags().DurationVar(&expires, "expires", 0, "`duration` after which the key expires, such as 720h (default: never)")
	cmd.Flags().Int32Var(&req.RequestsPerMinute, "requests-per-minute", 0, "`number` of completions that the key may request a minute (default: any)")
	cmd.Flags().Int32Var(&req.TokensPerMinute, "tokens-per-minute", 0, "`number` of tokens of prompts and completions a minute (default: any)")
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		req.Name = args[0]
		if cmd.Flags().Changed("expires") {
			req.Expires = timestamppb.New(env.Now().Add(expires))
		}
		return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
			made, err := c.Keys.CreateApiKey(ctx, req)
			if err != nil {
				return err
			}
			if env.JSON() {
				return output.Value(env.Stdout, map[string]string{"name": req.GetName(), "scope": req.GetScope(), "project": req.GetProject(), "key": made.GetKey()})
			}
			where := ""
			if req.GetProject() != "" {
				where = " in the project " + req.GetProject()
			}
			env.Note("created the key %s with the scope %s%s; it is shown only once", req.GetName(), req.GetScope(), where)
			_, err = fmt.Fprintln(env.Stdout, made.GetKey())
			return err
		})
	}
	return cmd
}

// all reads all pages of the list.
func all(ctx context.Context, c *client.Client) (list []*keyv1.ApiKey, err error) {
	return list, paging.All(func(token string) (string, error) {
		page, err := c.Keys.ListApiKeys(ctx, &keyv1.ListApiKeysRequest{PageToken: token})
		list = append(list, page.GetKeys()...)
		return page.GetNextPageToken(), err
	})
}

func listCommand(env *cli.Env) *cobra.Command {
	cmd := &cobra.Command{Use: "list", Short: "List keys", Example: "  rollout keys list\n  rollout keys list --format json", Args: cobra.NoArgs}
	cmd.RunE = func(*cobra.Command, []string) error {
		return env.Plane.Look(cmd, func(ctx context.Context, c *client.Client) error {
			list, err := all(ctx, c)
			if err != nil {
				return err
			}
			if env.JSON() {
				return output.Value(env.Stdout, map[string]any{"keys": rows(list)})
			}
			if len(list) == 0 {
				_, err := fmt.Fprintln(env.Stdout, "no keys")
				return err
			}
			s := env.Style()
			var table output.Table
			table.Row(s.Bold("NAME"), s.Bold("SCOPE"), s.Bold("PROJECT"), s.Bold("CREATED"), s.Bold("LAST USED"), s.Bold("EXPIRES"), s.Bold("PER MINUTE"))
			for _, k := range list {
				table.Row(k.GetName(), k.GetScope(), cmp.Or(k.GetProject(), "-"), env.Time(k.GetCreated().AsTime()), orNever(env, k.GetLastUsed()), orNever(env, k.GetExpires()), perMinute(k))
			}
			_, err = io.WriteString(env.Stdout, table.String())
			return err
		})
	}
	return cmd
}

func orNever(env *cli.Env, t *timestamppb.Timestamp) string {
	if t == nil {
		return "never"
	}
	return env.Time(t.AsTime())
}

// rows returns the keys as JSON objects.
func rows(list []*keyv1.ApiKey) []map[string]any {
	out := []map[string]any{}
	for _, k := range list {
		row := map[string]any{"name": k.GetName(), "scope": k.GetScope(), "project": k.GetProject(), "created": k.GetCreated().AsTime()}
		for name, t := range map[string]*timestamppb.Timestamp{"expires": k.GetExpires(), "last_used": k.GetLastUsed()} {
			if t != nil {
				row[name] = t.AsTime()
			}
		}
		for name, limit := range map[string]int32{"requests_per_minute": k.GetRequestsPerMinute(), "tokens_per_minute": k.GetTokensPerMinute()} {
			if limit > 0 {
				row[name] = limit
			}
		}
		out = append(out, row)
	}
	return out
}

// perMinute returns the limits as text.
func perMinute(k *keyv1.ApiKey) string {
	var parts []string
	if n := k.GetRequestsPerMinute(); n > 0 {
		parts = append(parts, fmt.Sprintf("%d requests", n))
	}
	if n := k.GetTokensPerMinute(); n > 0 {
		parts = append(parts, fmt.Sprintf("%d tokens", n))
	}
	return cmp.Or(strings.Join(parts, ", "), "any")
}

func revokeCommand(env *cli.Env) *cobra.Command {
	cmd := &cobra.Command{
		Use: "revoke NAME", Short: "Revoke a key", Example: "  rollout keys revoke ada", Args: cobra.ExactArgs(1),
	}
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
			if _, err := c.Keys.RevokeApiKey(ctx, &keyv1.RevokeApiKeyRequest{Name: args[0]}); err != nil {
				return err
			}
			if env.JSON() {
				return output.Value(env.Stdout, map[string]string{"revoked": args[0]})
			}
			_, err := fmt.Fprintf(env.Stdout, "revoked the key %s\n", args[0])
			return err
		})
	}
	return cmd
}
