package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/rollout-rl/rollout/cmd/internal/scripted"
)

// serveOpenAI serves a policy with OpenAI's API until ctx ends. The other routes are those by which
// gateways recognize an engine.
func serveOpenAI(ctx context.Context, address, aborts string) error {
	aborted, err := scripted.OpenAborts(aborts)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	constant := func(path string, body any) {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(body)
		})
	}
	constant("/health", map[string]any{})
	constant("/v1/models", map[string]any{"object": "list", "data": []any{map[string]any{"id": "scripted", "object": "model", "created": 1, "owned_by": "vllm"}}})
	constant("/version", map[string]any{"version": "0.32.0"})
	mux.HandleFunc("/v1/chat/completions", func(w http.ResponseWriter, r *http.Request) { complete(w, r, aborted) })
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	go func() {
		<-ctx.Done()
		_ = server.Close()
	}()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// complete streams a chat completion at the pace that its last message asks for.
func complete(w http.ResponseWriter, r *http.Request, aborted *scripted.Aborts) {
	var body struct {
		Messages  []message `json:"messages"`
		MaxTokens int       `json:"max_tokens"`
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || len(body.Messages) == 0 {
		http.Error(w, "expected messages", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	head := fmt.Sprintf(`data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":%d,"model":"scripted","choices":[{"index":0,"delta":`, time.Now().Unix())
	flush := http.NewResponseController(w)
	pace := scripted.Pace(body.Messages[len(body.Messages)-1].Content)
	err := scripted.Sample(r.Context(), pace, body.MaxTokens, aborted, func(i int, text string) error {
		role, finish, end := "", "null", ""
		if i == 0 {
			role = `"role":"assistant",`
		}
		if i == body.MaxTokens-1 {
			finish, end = `"length"`, "data: [DONE]\n\n"
		}
		if _, err := fmt.Fprintf(w, "%s{%s\"content\":\"%s\"},\"finish_reason\":%s}]}\n\n%s", head, role, text, finish, end); err != nil {
			return err
		}
		return flush.Flush()
	})
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}
