package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/scripted"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// conversation is the chat of one session.
type conversation struct {
	id       string
	turn     int
	messages []message
}

// ask adds the next message of the user, after what the policy said.
func (c *conversation) ask(p plan) {
	c.messages = append(c.messages, message{"user", scripted.Prompt(p.pace)})
}

// web is a client of OpenAI's API.
type web struct {
	plan
	client *http.Client
}

func newWeb(p plan) *web {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost, transport.MaxIdleConns, transport.DisableCompression = p.streams+1, p.streams+1, true
	return &web{plan: p, client: &http.Client{Transport: transport}}
}

func (w *web) complete(ctx context.Context, c *conversation, token func([]byte)) error {
	body, err := json.Marshal(map[string]any{"model": w.model, "messages": c.messages, "max_tokens": w.tokens, "stream": true})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.target+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer none")
	if w.sessions {
		req.Header.Set("X-Session-ID", c.id)
	}
	resp, err := w.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body)
		return fmt.Errorf("HTTP %d: %s", resp.StatusCode, text)
	}
	return events(resp.Body, token)
}

// events reads the chunks of a completion until its end.
func events(body io.Reader, token func([]byte)) error {
	lines := bufio.NewReaderSize(body, 16<<10)
	content := []byte(`"content":"`)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return fmt.Errorf("the stream ended early: %w", err)
		}
		line, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue
		}
		if bytes.HasPrefix(bytes.TrimLeft(line, " "), []byte("[DONE]")) {
			_, err := io.Copy(io.Discard, lines)
			return err
		}
		at := bytes.Index(line, content)
		if at < 0 {
			if bytes.Contains(line, []byte(`"error"`)) {
				return fmt.Errorf("an error in the stream: %s", line)
			}
			continue
		}
		text := line[at+len(content):]
		if end := bytes.IndexByte(text, '"'); end > 0 {
			token(text[:end])
		}
	}
}

// direct is a client that calls an inference worker like the gateway does.
type direct struct {
	plan
	worker inferencev1.InferenceWorkerServiceClient
}

func newDirect(p plan) (*direct, error) {
	const window = 4 << 20 // fixed, as in libs/rpc
	conn, err := grpc.NewClient(p.target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", p.target, err)
	}
	return &direct{plan: p, worker: inferencev1.NewInferenceWorkerServiceClient(conn)}, nil
}

func (d *direct) complete(ctx context.Context, c *conversation, token func([]byte)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	chat := &inferencev1.Chat{}
	for _, m := range c.messages {
		chat.Messages = append(chat.Messages, &inferencev1.ChatMessage{Role: m.Role, Content: m.Content})
	}
	stream, err := d.worker.Generate(ctx, &inferencev1.GenerateRequest{
		RequestId: fmt.Sprintf("req-%s-%d", c.id, c.turn), N: 1, Stream: true, Parse: true,
		Prompts: []*inferencev1.Prompt{{Kind: &inferencev1.Prompt_Chat{Chat: chat}}},
		Params:  &inferencev1.SamplingParams{MaxTokens: proto.Uint32(uint32(d.tokens)), Seed: proto.Uint64(1)},
		Session: &inferencev1.SessionState{SessionId: c.id, Known: uint32(2 * c.turn)},
	})
	if err != nil {
		return err
	}
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		token([]byte(piece.GetDelta().GetContent()))
	}
}
