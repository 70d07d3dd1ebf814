// Command clients runs openai-go and anthropic-sdk-go against a gateway. Arguments: URL, key,
// model, seconds that each case is repeated for. It prints a JSON object for each case.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/anthropics/anthropic-sdk-go"
	anthropicopt "github.com/anthropics/anthropic-sdk-go/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/responses"
)

const tokens = 40

var schema = map[string]any{
	"type": "object", "properties": map[string]any{"on": map[string]any{"type": "boolean"}}, "required": []string{"on"}, "additionalProperties": false,
}

// span is an element of weight_versions.
type span struct{ Version, Start, End int }

// counted checks the weights version of each token of a greedy completion (see counting.py).
func counted(ids []int, spans []span) error {
	next := 0
	for _, s := range spans {
		if s.Start != next {
			return fmt.Errorf("the spans %v have a gap", spans)
		}
		next = s.End
		for at := max(1, s.Start); at < s.End && at < len(ids); at++ {
			if (ids[at]-ids[at-1]+94)%94 != 1+s.Version%7 {
				return fmt.Errorf("token %d of %v is not of version %d: %v", at, ids, s.Version, spans)
			}
		}
	}
	if next != len(ids) || next != tokens {
		return fmt.Errorf("%d tokens with the spans %v", len(ids), spans)
	}
	return nil
}

func characters(text string) []int {
	ids := make([]int, 0, len(text))
	for _, c := range text {
		ids = append(ids, int(c)-'!')
	}
	return ids
}

// choice is our part of a choice, or of a message.
type choice struct {
	TokenIDs       []int  `json:"token_ids"`
	WeightVersions []span `json:"weight_versions"`
}

func (c choice) check() error { return counted(c.TokenIDs, c.WeightVersions) }

func decode(raw string) (c choice, err error) {
	err = json.Unmarshal([]byte(raw), &c)
	return c, err
}

type suite struct {
	model     string
	openai    openai.Client
	anthropic anthropic.Client
}

func (s *suite) chat(text string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: s.model, Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)}, Temperature: openai.Float(0), MaxTokens: openai.Int(tokens),
	}
}

var withIDs = option.WithJSONSet("return_token_ids", true)

func (s *suite) ask(ctx context.Context, text string) error {
	done, err := s.openai.Chat.Completions.New(ctx, s.chat(text), withIDs)
	if err != nil {
		return err
	}
	got, err := decode(done.Choices[0].RawJSON())
	if err != nil {
		return err
	}
	if !slices.Equal(characters(done.Choices[0].Message.Content), got.TokenIDs) {
		return fmt.Errorf("%q is not the text of %v", done.Choices[0].Message.Content, got.TokenIDs)
	}
	return got.check()
}

func (s *suite) models(ctx context.Context) error {
	found := s.openai.Models.ListAutoPaging(ctx)
	for found.Next() {
		if found.Current().ID == s.model {
			return nil
		}
	}
	return errors.Join(found.Err(), errors.New("the model is not listed"))
}

func (s *suite) chats(ctx context.Context) error { return s.ask(ctx, "count") }

func (s *suite) streamed(ctx context.Context) error {
	stream := s.openai.Chat.Completions.NewStreaming(ctx, s.chat("count"))
	var last choice
	var all openai.ChatCompletionAccumulator
	for stream.Next() {
		piece := stream.Current()
		all.AddChunk(piece)
		if len(piece.Choices) > 0 && piece.Choices[0].FinishReason != "" {
			var err error
			if last, err = decode(piece.Choices[0].RawJSON()); err != nil {
				return err
			}
		}
	}
	if err := stream.Err(); err != nil {
		return err
	}
	return counted(characters(all.Choices[0].Message.Content), last.WeightVersions)
}

func (s *suite) manyAtOnce(ctx context.Context) error {
	var wg sync.WaitGroup
	failed := make([]error, 32)
	for i := range failed {
		wg.Go(func() { failed[i] = s.ask(ctx, "count "+strconv.Itoa(i)) })
	}
	wg.Wait()
	return errors.Join(failed...)
}

func (s *suite) tools(ctx context.Context) error {
	req := s.chat("count")
	req.MaxTokens = openai.Int(400)
	req.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{Name: "switch", Parameters: schema, Strict: openai.Bool(true)})}
	req.ToolChoice = openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: param.NewOpt("required")}
	done, err := s.openai.Chat.Completions.New(ctx, req)
	if err != nil {
		return err
	}
	calls := done.Choices[0].Message.ToolCalls
	if len(calls) == 0 {
		return fmt.Errorf("no call in %s", done.RawJSON())
	}
	var arguments struct{ On *bool }
	if err := json.Unmarshal([]byte(calls[0].Function.Arguments), &arguments); err != nil || arguments.On == nil {
		return fmt.Errorf("arguments %s, %w", calls[0].Function.Arguments, err)
	}
	req.Messages = append(req.Messages, done.Choices[0].Message.ToParam(), openai.ToolMessage("done", calls[0].ID))
	req.ToolChoice = openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: param.NewOpt("none")}
	req.MaxTokens = openai.Int(tokens)
	_, err = s.openai.Chat.Completions.New(ctx, req)
	return err
}

func (s *suite) completions(ctx context.Context) error {
	done, err := s.openai.Completions.New(ctx, openai.CompletionNewParams{
		Model: openai.CompletionNewParamsModel(s.model), Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("ab")},
		Temperature: openai.Float(0), MaxTokens: openai.Int(tokens), Logprobs: openai.Int(1),
	}, withIDs)
	if err != nil {
		return err
	}
	got, err := decode(done.Choices[0].RawJSON())
	if err != nil {
		return err
	}
	return got.check()
}

func (s *suite) responses(ctx context.Context) error {
	req := responses.ResponseNewParams{
		Model: s.model, Input: responses.ResponseNewParamsInputUnion{OfString: openai.String("count")}, MaxOutputTokens: openai.Int(tokens),
	}
	first, err := s.openai.Responses.New(ctx, req)
	if err != nil {
		return err
	}
	req.PreviousResponseID = openai.String(first.ID)
	stream := s.openai.Responses.NewStreaming(ctx, req)
	var text strings.Builder
	for stream.Next() {
		text.WriteString(stream.Current().Delta)
	}
	if text.Len() == 0 || len(first.OutputText()) != tokens {
		return fmt.Errorf("first %q, then %q, %w", first.OutputText(), text.String(), stream.Err())
	}
	return stream.Err()
}

func (s *suite) errors(ctx context.Context) error {
	req := s.chat("count")
	req.Model = "another"
	_, err := s.openai.Chat.Completions.New(ctx, req)
	if known, ok := errors.AsType[*openai.Error](err); !ok || known.StatusCode != 404 || known.Code != "model_not_found" {
		return fmt.Errorf("unexpected error %w", err)
	}
	return nil
}

func (s *suite) message() anthropic.MessageNewParams {
	return anthropic.MessageNewParams{
		Model: anthropic.Model(s.model), MaxTokens: tokens, Temperature: anthropic.Float(0),
		Messages: []anthropic.MessageParam{anthropic.NewUserMessage(anthropic.NewTextBlock("count"))},
	}
}

func (s *suite) messages(ctx context.Context) error {
	done, err := s.anthropic.Messages.New(ctx, s.message(), anthropicopt.WithJSONSet("return_token_ids", true))
	if err != nil {
		return err
	}
	got, err := decode(done.RawJSON())
	if err != nil {
		return err
	}
	return got.check()
}

func (s *suite) streamedMessages(ctx context.Context) error {
	stream := s.anthropic.Messages.NewStreaming(ctx, s.message())
	var all anthropic.Message
	for stream.Next() {
		if err := all.Accumulate(stream.Current()); err != nil {
			return err
		}
	}
	if stream.Err() == nil && len(all.Content[0].Text) != tokens {
		return fmt.Errorf("text %q", all.Content[0].Text)
	}
	return stream.Err()
}

func (s *suite) toolMessages(ctx context.Context) error {
	req := s.message()
	req.MaxTokens = 400
	req.Tools = []anthropic.ToolUnionParam{{OfTool: &anthropic.ToolParam{
		Name: "switch", InputSchema: anthropic.ToolInputSchemaParam{
			Properties: schema["properties"], Required: []string{"on"}, ExtraFields: map[string]any{"additionalProperties": false},
		},
	}}}
	req.ToolChoice = anthropic.ToolChoiceUnionParam{OfTool: &anthropic.ToolChoiceToolParam{Name: "switch"}}
	done, err := s.anthropic.Messages.New(ctx, req)
	if err != nil {
		return err
	}
	if last := done.Content[len(done.Content)-1]; last.Type != "tool_use" || last.Name != "switch" {
		return fmt.Errorf("no call in %s", done.RawJSON())
	}
	return nil
}

// version returns the version of a module that this command is built with.
func version(module string) string {
	info, _ := debug.ReadBuildInfo()
	for _, d := range info.Deps {
		if d.Path == module {
			return d.Version
		}
	}
	return ""
}

func main() {
	url, key, model := os.Args[1], os.Args[2], os.Args[3]
	seconds, err := strconv.ParseFloat(os.Args[4], 64)
	if err != nil {
		panic(err)
	}
	s := &suite{
		model:     model,
		openai:    openai.NewClient(option.WithBaseURL(url+"/v1"), option.WithAPIKey(key), option.WithMaxRetries(0)),
		anthropic: anthropic.NewClient(anthropicopt.WithBaseURL(url), anthropicopt.WithAPIKey(key), anthropicopt.WithMaxRetries(0)),
	}
	ours, theirs := "openai (Go) "+version("github.com/openai/openai-go/v3"), "anthropic (Go) "+version("github.com/anthropics/anthropic-sdk-go")
	for _, c := range []struct {
		client, name string
		run          func(context.Context) error
	}{
		{ours, "models", s.models},
		{ours, "chat", s.chats},
		{ours, "streamed chat", s.streamed},
		{ours, "many at once", s.manyAtOnce},
		{ours, "tools", s.tools},
		{ours, "completions", s.completions},
		{ours, "responses", s.responses},
		{ours, "errors", s.errors},
		{theirs, "messages", s.messages},
		{theirs, "streamed messages", s.streamedMessages},
		{theirs, "tools", s.toolMessages},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		end, times, failure := time.Now().Add(time.Duration(seconds*float64(time.Second))), 0, ""
		for times == 0 || time.Now().Before(end) {
			if err := c.run(ctx); err != nil {
				failure = err.Error()
				break
			}
			times++
		}
		cancel()
		line, _ := json.Marshal(map[string]any{"client": c.client, "case": c.name, "times": times, "error": failure})
		fmt.Println(string(line))
	}
}
