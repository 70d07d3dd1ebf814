// Package chat has the command `rollout chat`.
package chat

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/paging"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

type flags struct {
	model, system     string
	temperature, topP float64
	maxTokens         uint32
	raw               bool
	cmd               *cobra.Command // that has the flags
}

// Command returns `rollout chat`.
func Command(env *cli.Env) *cobra.Command {
	f := &flags{}
	f.cmd = &cobra.Command{
		Use:   "chat [MESSAGE]",
		Short: "Chat with the policy of a run",
		Long: `Chat with the policy of an active run. With MESSAGE the command prints the answer and exits. Without it, each line of standard input
is a message; /reset starts a new conversation, /quit or Ctrl-D exits. With --raw each line is a plain text that the policy
continues, without chat template and history.`,
		Example: `  rollout chat --model addition-grpo
  rollout chat "What is 17+25?" --temperature 0
  rollout chat --raw "17+25="`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return execute(env, f, args) },
	}
	set := f.cmd.Flags()
	set.StringVarP(&f.model, "model", "m", "", "`policy`: the name or id of a run (default: the only active one)")
	set.StringVar(&f.system, "system", "", "system `message`")
	set.Float64Var(&f.temperature, "temperature", 0, "softmax temperature (default: the run's)")
	set.Float64Var(&f.topP, "top-p", 0, "nucleus probability (default: the run's)")
	set.Uint32Var(&f.maxTokens, "max-tokens", 0, "maximum number of new tokens (default: the run's)")
	set.BoolVar(&f.raw, "raw", false, "continue plain text, without chat template and history")
	return f.cmd
}

func execute(env *cli.Env, f *flags, args []string) error {
	ctx, stop := signal.NotifyContext(f.cmd.Context(), os.Interrupt)
	client, err := env.Plane.Connect(ctx, false) // a new daemon would serve no policy
	stop()
	if err != nil {
		return err
	}
	defer client.Close()
	ctx = f.cmd.Context()
	model, err := chooseModel(ctx, client.Gateway, f.model)
	if err != nil {
		return err
	}
	c := &conversation{env: env, gateway: client.Gateway, flags: f, model: model}
	c.reset()
	if len(args) == 0 {
		return c.readLines(ctx)
	}
	interrupted, err := c.send(ctx, args[0])
	if interrupted {
		return context.Canceled
	}
	return err
}

// params returns the sampling parameters that the user set.
func (f *flags) params() *inferencev1.SamplingParams {
	params := &inferencev1.SamplingParams{}
	if f.cmd.Flags().Changed("temperature") {
		params.Temperature = proto.Float64(f.temperature)
	}
	if f.cmd.Flags().Changed("top-p") {
		params.TopP = proto.Float64(f.topP)
	}
	if f.maxTokens > 0 {
		params.MaxTokens = proto.Uint32(f.maxTokens)
	}
	return params
}

// chooseModel returns the served policy of a name or run id; without a name, the only one.
func chooseModel(ctx context.Context, gateway gatewayv1.RolloutGatewayServiceClient, name string) (*gatewayv1.Model, error) {
	var models []*gatewayv1.Model
	err := paging.All(func(token string) (string, error) {
		page, err := gateway.ListModels(ctx, &gatewayv1.ListModelsRequest{PageToken: token})
		models = append(models, page.GetModels()...)
		return page.GetNextPageToken(), err
	})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, model := range models {
		names = append(names, model.GetName())
		named := name != "" && (name == model.GetName() || name == model.GetRunId())
		if named || name == "" && len(models) == 1 {
			return model, nil
		}
	}
	switch {
	case len(models) == 0:
		return nil, exit.New(exit.NoInput, "start a run: its policy is available while its inference workers run", "no run with a policy is active")
	case name == "":
		return nil, exit.New(exit.Usage, "choose one with --model", "several policies are active: %s", strings.Join(names, ", "))
	}
	return nil, exit.New(exit.NoInput, "active policies are "+strings.Join(names, ", "), "policy %q does not exist", name)
}

// conversation sends messages to one policy, with the history of those before.
type conversation struct {
	env     *cli.Env
	gateway gatewayv1.RolloutGatewayServiceClient
	flags   *flags
	model   *gatewayv1.Model
	history []*inferencev1.ChatMessage
	session string // id that the gateway gave
}

// reset forgets all messages but the system message.
func (c *conversation) reset() {
	c.history, c.session = nil, ""
	if c.flags.system != "" {
		c.add("system", c.flags.system)
	}
}

func (c *conversation) add(role, text string) {
	c.history = append(c.history, &inferencev1.ChatMessage{Role: role, Content: text})
}

// readLines sends each line of stdin as a message. An error ends it, unless a person types.
func (c *conversation) readLines(ctx context.Context) error {
	prompts := c.env.Terminal && !c.env.JSON()
	s := c.env.Style()
	prompt := func() {
		if prompts {
			fmt.Fprint(c.env.Stdout, s.Cyan("> "))
		}
	}
	if prompts {
		fmt.Fprintf(c.env.Stdout, "%s\n", s.Dim(fmt.Sprintf("%s, weights v%d; /reset starts a new conversation, /quit exits", c.model.GetName(), c.model.GetWeightsVersion())))
	}
	lines := bufio.NewScanner(c.env.Stdin)
	lines.Buffer(nil, 1<<20)
	for prompt(); lines.Scan(); prompt() {
		switch text := strings.TrimSpace(lines.Text()); text {
		case "":
		case "/quit", "/exit":
			return nil
		case "/reset":
			c.reset()
		default:
			_, err := c.send(ctx, lines.Text())
			if err != nil && !c.env.Interactive {
				return err
			}
			if err != nil {
				c.env.Error(exit.From(err), err)
			}
		}
	}
	if c.env.Terminal {
		fmt.Fprintln(c.env.Stdout)
	}
	return lines.Err()
}

// send sends one message and prints the answer as it streams in. Ctrl-C ends the answer, not the
// conversation. A message that fails is removed from the history: roles must alternate.
func (c *conversation) send(ctx context.Context, text string) (interrupted bool, err error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	before := len(c.history)
	defer func() {
		if err != nil {
			c.history = c.history[:before]
		}
	}()
	if !utf8.ValidString(text) {
		return false, exit.New(exit.Data, "encode it as UTF-8", "the message is not UTF-8")
	}
	prompt := &inferencev1.Prompt{Kind: &inferencev1.Prompt_Text{Text: text}}
	if !c.flags.raw {
		c.add("user", text)
		prompt.Kind = &inferencev1.Prompt_Chat{Chat: &inferencev1.Chat{Messages: c.history}}
	}
	stream, err := c.gateway.Complete(ctx, &gatewayv1.CompleteRequest{
		Model: c.model.GetName(), Prompts: []*inferencev1.Prompt{prompt}, Params: c.flags.params(), N: 1, Stream: true, SessionId: c.session,
	})
	if err != nil {
		return false, err
	}
	var answer strings.Builder
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if ctx.Err() != nil {
			fmt.Fprintln(c.env.Stdout, c.env.Style().Yellow(" (stopped)"))
			interrupted = true
			break
		}
		if err != nil {
			return false, err
		}
		c.session = response.GetSessionId()
		answer.WriteString(response.GetPiece().GetText())
		if err := c.print(response); err != nil {
			return false, err
		}
	}
	if !c.flags.raw {
		c.add("assistant", answer.String())
	}
	if !interrupted && !c.env.JSON() {
		fmt.Fprintln(c.env.Stdout)
	}
	return interrupted, nil
}

func (c *conversation) print(response *gatewayv1.CompleteResponse) error {
	if c.env.JSON() {
		return output.Line(c.env.Stdout, "", response)
	}
	_, err := io.WriteString(c.env.Stdout, printable(response.GetPiece().GetText()))
	return err
}

// printable replaces control characters: a policy in training may generate anything.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || r >= 0x20 && r != 0x7f && (r < 0x80 || r > 0x9f) {
			return r
		}
		return '\uFFFD'
	}, text)
}
