// Package serve has the command `rollout serve`.
package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	servingv1 "github.com/rollout-rl/rollout/proto/gen/rollout/serving/v1"
)

const serveLong = `Serve a model with the APIs of OpenAI, Anthropic, vLLM, and SGLang, as the policy of a run is served while it samples.

The model is a folder in the Hugging Face layout, a run (its newest snapshot), or a snapshot; weights of a snapshot are copied into
the state folder once. It is served until Ctrl-C, or with --detach until ` + "`rollout serve stop`" + ` or the end of the daemon.

Values that a request does not set come from --config, else from the run's evaluations, else they are temperature 1, and as many tokens
as fit the context. For --engine vllm and sglang, --python names the interpreter of the engine's own environment.

The same address shows a page to chat with the model. For the endpoints see docs/inference.md.`

// flags of `rollout serve`.
type flags struct {
	cmd                                  *cobra.Command
	config                               cli.ConfigFlags
	model, name, engine, python, dtype   string
	workers, slots, maxModelLen, threads uint32
	port                                 uint16
	detach                               bool
}

// Command returns `rollout serve`.
func Command(env *cli.Env) *cobra.Command {
	f := &flags{}
	f.cmd = &cobra.Command{
		Use:   "serve --model FOLDER|RUN|SNAPSHOT",
		Short: "Serve a model without a run",
		Long:  serveLong,
		Example: `  rollout serve --model models/Qwen3-0.6B
  rollout serve --model addition-grpo --port 8000
  rollout serve --model snap-01k3 --name before --detach
  rollout serve --model models/Qwen3-0.6B --engine vllm --python .tools/vllm/bin/python --max-model-len 8192
  rollout serve list
  rollout serve stop before`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.model == "" {
				return cli.Usage("--model is required: a folder, a run, or a snapshot")
			}
			if err := f.ownPort(env); err != nil {
				return err
			}
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error { return f.serve(ctx, env, c) })
		},
	}
	set := f.cmd.Flags()
	set.StringVarP(&f.model, "model", "m", "", "`folder` of a model, run (its newest snapshot), or id of a snapshot")
	set.StringVar(&f.name, "name", "", "`name` of the model in requests (default: that of the folder or run, else the id of the snapshot)")
	f.config.AddTo(f.cmd)
	set.StringVar(&f.engine, "engine", "", "`engine`: transformers, vllm or sglang (default: the configuration's)")
	set.StringVar(&f.python, "python", "", "`interpreter` of the engine's environment (default: engine.python of the configuration)")
	set.StringVar(&f.dtype, "dtype", "", "data `type` of the weights: float32 or bfloat16 (default: the configuration's)")
	set.Uint32Var(&f.workers, "workers", 0, "worker processes, each with the whole model (default: the configuration's)")
	set.Uint32Var(&f.slots, "slots", 0, "sequences that a worker decodes concurrently (default: the configuration's)")
	set.Uint32Var(&f.maxModelLen, "max-model-len", 0, "maximum length of prompt and completion together (default: the configuration's, if the model allows it)")
	set.Uint32Var(&f.threads, "threads", 0, "CPU threads of a worker; 0: a share of the cores (default: the configuration's)")
	set.Uint16Var(&f.port, "port", 0, "`port` on 127.0.0.1, if the command starts the daemon (default: a free one, the same each time)")
	set.BoolVar(&f.detach, "detach", false, "return when the model is served")
	_ = f.cmd.MarkFlagDirname("model")
	_ = f.cmd.RegisterFlagCompletionFunc("engine", cobra.FixedCompletions([]string{"transformers", "vllm", "sglang"}, cobra.ShellCompDirectiveNoFileComp))
	f.cmd.AddCommand(listCommand(env), stopCommand(env))
	return f.cmd
}

// ownPort starts the local daemon with the port that the user chose.
func (f *flags) ownPort(env *cli.Env) error {
	if f.port == 0 {
		return nil
	}
	if !env.Plane.Local() {
		return cli.Usage("--port is for the local daemon: the endpoint of another control plane has the address gateway.listen of its configuration")
	}
	state, err := env.Plane.StateDir()
	if err != nil {
		return err
	}
	wanted := net.JoinHostPort("127.0.0.1", strconv.Itoa(int(f.port)))
	info, err := env.Plane.Daemon(f.cmd.Context(), state, true, "--gateway-listen", wanted)
	if err != nil {
		return err
	}
	if _, at, _ := strings.Cut(info.Gateway, "://"); at != wanted {
		return exit.New(exit.Usage, "leave --port out, or stop the daemon first: `rollout daemon stop`",
			"the local daemon runs already, and its endpoint is %s, not port %d", info.Gateway, f.port)
	}
	return nil
}

// stopTimeout is how long the workers may take to finish requests and exit.
const stopTimeout = 30 * time.Second

func (f *flags) serve(ctx context.Context, env *cli.Env, c *client.Client) error {
	w, err := f.wanted(ctx, env, c)
	if err != nil {
		return err
	}
	env.Note("%s", w.note)
	// Ctrl-C asks the scheduler to stop the workers. The stream ends when they have exited.
	serving, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	stream, err := c.Serving.ServeModel(serving, w.request)
	if err != nil {
		return err
	}
	watch := &watch{env: env, client: c, wanted: w}
	stopping := context.AfterFunc(ctx, func() {
		watch.stop()
		cancel()
	})
	defer stopping()
	for {
		response, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF), err != nil && ctx.Err() != nil:
			env.Note("stopped %s", w.request.GetConfig().GetName())
			return nil
		case err != nil:
			return err
		}
		ready, err := watch.show(response.GetServing())
		if err != nil || ready && f.detach {
			return err
		}
	}
}

// watch follows one served model.
type watch struct {
	env    *cli.Env
	client *client.Client
	wanted *wanted
	shown  bool   // it was served
	said   string // the last note
}

// stop stops the model, and returns when its workers have exited.
func (w *watch) stop() {
	w.env.Note("stopping the workers")
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if _, err := w.client.Serving.StopServing(ctx, &servingv1.StopServingRequest{ServingId: w.wanted.request.GetConfig().GetName()}); err != nil {
		w.env.Note("the workers could not be stopped: %s", rpcerr.Text(err))
	}
}

// show prints a state, and the addresses when the first worker answers.
func (w *watch) show(s *servingv1.Serving) (ready bool, err error) {
	if s.GetState() != servingv1.ServingState_SERVING_STATE_SERVING {
		if s.GetMessage() != "" && s.GetMessage() != w.said {
			w.said = s.GetMessage()
			w.env.Note("waiting for %s", s.GetMessage())
		}
		return false, nil
	}
	if w.shown {
		return true, nil
	}
	w.shown = true
	return true, w.print(s)
}

func (w *watch) print(s *servingv1.Serving) error {
	gateway, err := w.gateway()
	if err != nil {
		return err
	}
	base := gateway + "/v1"
	if w.env.JSON() {
		return output.Value(w.env.Stdout, map[string]any{
			"serving_id": s.GetServingId(), "name": s.GetName(), "model": s.GetModel(), "weights_version": s.GetWeightsVersion(), "engine": s.GetEngine(),
			"workers": s.GetWorkers(), "base_url": base, "api_key": "none", "page": gateway + "/",
		})
	}
	var table output.Table
	table.Row("model", fmt.Sprintf("%s, %s with %s", s.GetName(), s.GetModel(), s.GetEngine()))
	table.Row("base URL", base)
	table.Row("API key", "none on this machine for your user (clients that insist: \"none\"); others: `rollout keys create NAME --scope sample`")
	table.Row("page", gateway+"/")
	table.Row("try", w.wanted.curl(base))
	if _, err := io.WriteString(w.env.Stdout, table.String()); err != nil {
		return err
	}
	w.env.Note("%s", w.ending())
	return nil
}

func (w *watch) ending() string {
	if w.wanted.request.GetDetached() {
		return "`rollout serve stop " + w.wanted.request.GetConfig().GetName() + "` stops it"
	}
	return "Ctrl-C stops it"
}

// gateway is the URL of the endpoint.
func (w *watch) gateway() (string, error) {
	if !w.env.Plane.Local() {
		return "http://GATEWAY", nil // only the control plane's configuration names it
	}
	state, err := w.env.Plane.StateDir()
	if err != nil {
		return "", err
	}
	info, err := daemon.Find(state)
	if err != nil || info == nil || info.Gateway == "" {
		return "http://GATEWAY", err
	}
	return info.Gateway, nil
}

func listCommand(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the served models", Args: cobra.NoArgs,
		Example: "  rollout serve list\n  rollout serve list --format json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return env.Plane.Look(cmd, func(ctx context.Context, c *client.Client) error {
				list := &servingv1.ListServingsResponse{}
				err := paging.All(func(token string) (string, error) {
					page, err := c.Serving.ListServings(ctx, &servingv1.ListServingsRequest{PageToken: token})
					list.Servings = append(list.Servings, page.GetServings()...)
					return page.GetNextPageToken(), err
				})
				if err != nil {
					return err
				}
				return env.Message(list, func() string { return listText(env, list.GetServings()) })
			})
		},
	}
}

func listText(env *cli.Env, servings []*servingv1.Serving) string {
	if len(servings) == 0 {
		return "no model is served\n"
	}
	s := env.Style()
	var table output.Table
	table.Row(s.Bold("NAME"), s.Bold("STATE"), s.Bold("WORKERS"), s.Bold("ENGINE"), s.Bold("SINCE"), s.Bold("MODEL"))
	for _, each := range servings {
		state := strings.ToLower(each.GetState().String()[len("SERVING_STATE_"):])
		if each.GetState() == servingv1.ServingState_SERVING_STATE_FAILED {
			first, _, _ := strings.Cut(each.GetMessage(), "\n")
			state = s.Red(state + ": " + first)
		}
		table.Row(each.GetName(), state, fmt.Sprintf("%d of %d", each.GetReadyWorkers(), each.GetWorkers()), each.GetEngine(),
			env.Time(each.GetCreateTime().AsTime()), each.GetModel())
	}
	return table.String()
}

func stopCommand(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use: "stop NAME", Short: "Stop a served model", Args: cobra.ExactArgs(1),
		Long:    "Stop the workers of a served model, by its name or id, and return when they have exited.",
		Example: "  rollout serve stop before",
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.Look(cmd, func(ctx context.Context, c *client.Client) error {
				stopped, err := c.Serving.StopServing(ctx, &servingv1.StopServingRequest{ServingId: args[0]})
				if err != nil {
					return err
				}
				return env.Message(stopped, func() string { return "stopped " + stopped.GetServing().GetName() + "\n" })
			})
		},
	}
}
