package main

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

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/exit"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

type chatFlags struct {
	model, system     string
	temperature, topP float64
	maxTokens         uint32
	raw               bool
	cmd               *cobra.Command
	history           []*inferencev1.ChatMessage
	session           string
	version           uint64
}

func (a *app) chatCommand() *cobra.Command {
	flags := &chatFlags{}
	cmd := &cobra.Command{
		Use:   "chat [MESSAGE]",
		Short: "Talk to the policy that is being trained",
		Long: `Talk to the policy that is being trained, through the gateway. With a MESSAGE the answer is printed and that is all; without one
each line of the input is a message. /reset begins anew, /quit or Ctrl-D leaves. With --raw a line is a plain text that the policy
goes on from, without chat template and history.`,
		Example: `  rollout chat --model addition-grpo
  rollout chat "What is 17+25?" --temperature 0
  rollout chat --raw "17+25="`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			flags.cmd = cmd
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt)
			a.looks = true // a daemon that is started now serves no policy
			c, err := a.dial(ctx)
			stop()
			if err != nil {
				return err
			}
			defer c.Close()
			if err := a.chooseModel(cmd.Context(), c, flags); err != nil {
				return err
			}
			flags.reset()
			if len(args) == 1 {
				stopped, err := a.say(cmd.Context(), c, flags, args[0])
				if stopped {
					return context.Canceled
				}
				return err
			}
			return a.converse(cmd.Context(), c, flags)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&flags.model, "model", "m", "", "`policy`: a run's name or id (default: the only one that is served)")
	f.StringVar(&flags.system, "system", "", "system `message`")
	f.Float64Var(&flags.temperature, "temperature", 0, "softmax temperature (default: the run's)")
	f.Float64Var(&flags.topP, "top-p", 0, "nucleus probability (default: the run's)")
	f.Uint32Var(&flags.maxTokens, "max-tokens", 0, "most new tokens (default: the run's)")
	f.BoolVar(&flags.raw, "raw", false, "go on from plain text, without chat template and history")
	return cmd
}

func (f *chatFlags) reset() {
	f.history = nil
	if f.system != "" {
		f.history = append(f.history, &inferencev1.ChatMessage{Role: "system", Content: f.system})
	}
}

func (f *chatFlags) answered(text string) {
	if !f.raw {
		f.history = append(f.history, &inferencev1.ChatMessage{Role: "assistant", Content: text})
	}
}

// params are the sampling parameters that the user set.
func (f *chatFlags) params() *inferencev1.SamplingParams {
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

// chooseModel fails early where no policy is served, or several and none was named.
func (a *app) chooseModel(ctx context.Context, c *client.Client, flags *chatFlags) error {
	response, err := c.Gateway.ListModels(ctx, &gatewayv1.ListModelsRequest{})
	if err != nil {
		return err
	}
	models := response.GetModels()
	var names []string
	for _, model := range models {
		names = append(names, model.GetName())
		named := flags.model != "" && (flags.model == model.GetName() || flags.model == model.GetRunId())
		if named || flags.model == "" && len(models) == 1 {
			flags.model, flags.version = model.GetName(), model.GetWeightsVersion()
			return nil
		}
	}
	switch {
	case len(models) == 0:
		return exit.New(exit.NoInput, "start a run: a policy is served while its inference workers are up", "no policy is served")
	case flags.model == "":
		return exit.New(exit.Usage, "choose one with --model", "several policies are served: %s", strings.Join(names, ", "))
	}
	return exit.New(exit.NoInput, "served are "+strings.Join(names, ", "), "there is no policy %q", flags.model)
}

// converse answers line by line.
func (a *app) converse(ctx context.Context, c *client.Client, flags *chatFlags) error {
	s := a.style()
	prompt := func() {
		if a.terminal && a.format != formatJSON {
			fmt.Fprint(a.stdout, s.Cyan("> "))
		}
	}
	if a.terminal && a.format != formatJSON {
		fmt.Fprintf(a.stdout, "%s\n", s.Dim(fmt.Sprintf("%s, weights v%d; /reset begins anew, /quit leaves", flags.model, flags.version)))
	}
	lines := bufio.NewScanner(a.stdin)
	lines.Buffer(nil, 1<<20)
	for prompt(); lines.Scan(); prompt() {
		switch text := strings.TrimSpace(lines.Text()); text {
		case "":
		case "/quit", "/exit":
			return nil
		case "/reset":
			flags.reset()
			flags.session = ""
		default:
			_, err := a.say(ctx, c, flags, lines.Text())
			if err != nil && !a.typed {
				return err
			}
			if err != nil { // a person may say something else
				a.fail(exit.From(err), err)
			}
		}
	}
	if a.terminal {
		fmt.Fprintln(a.stdout)
	}
	return lines.Err()
}

// say sends one message and prints the answer as it comes. Ctrl-C ends the answer, not the talk: it was stopped then.
func (a *app) say(ctx context.Context, c *client.Client, flags *chatFlags, text string) (stopped bool, err error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt)
	defer stop()
	said := len(flags.history)
	defer func() {
		if err != nil { // as if it had not been said: roles must alternate
			flags.history = flags.history[:said]
		}
	}()
	if !utf8.ValidString(text) {
		return false, exit.New(exit.Data, "send it as UTF-8", "the message is not UTF-8")
	}
	prompt := &inferencev1.Prompt{Kind: &inferencev1.Prompt_Text{Text: text}}
	if !flags.raw {
		flags.history = append(flags.history, &inferencev1.ChatMessage{Role: "user", Content: text})
		prompt.Kind = &inferencev1.Prompt_Chat{Chat: &inferencev1.Chat{Messages: flags.history}}
	}
	stream, err := c.Gateway.Complete(ctx, &gatewayv1.CompleteRequest{
		Model: flags.model, Prompts: []*inferencev1.Prompt{prompt}, Params: flags.params(), N: 1, Stream: true, SessionId: flags.session,
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
			fmt.Fprintln(a.stdout, a.style().Yellow(" (stopped)"))
			flags.answered(answer.String()) // templates want the roles to alternate
			return true, nil
		}
		if err != nil {
			return false, err
		}
		flags.session = response.GetSessionId()
		answer.WriteString(response.GetPiece().GetText())
		if a.format == formatJSON {
			err = output.Line(a.stdout, "", response)
		} else {
			_, err = io.WriteString(a.stdout, printable(response.GetPiece().GetText()))
		}
		if err != nil {
			return false, err
		}
	}
	flags.answered(answer.String())
	if a.format != formatJSON {
		fmt.Fprintln(a.stdout)
	}
	return false, nil
}

// printable takes out control characters: a policy in training may say anything.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || r >= 0x20 && r != 0x7f && (r < 0x80 || r > 0x9f) {
			return r
		}
		return '\uFFFD'
	}, text)
}
