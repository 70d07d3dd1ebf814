// Command gatewayload measures a gateway for bench/gateway.py. It sends the requests of many
// clients at the same time, through a gateway or to the policy behind it, and reports when each
// token arrived. With -serve it is a policy with OpenAI's API for gateways that need one.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// plan is what to send.
type plan struct {
	target   string
	model    string
	streams  int
	requests int // of each stream
	tokens   int
	pace     time.Duration
	sessions bool // whether requests name sessions
}

// turns is the number of requests of a session. The next one begins a new session.
const turns = 4

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "gatewayload:", err)
		os.Exit(1)
	}
}

func run() error {
	var p plan
	serve := flag.String("serve", "", "serve OpenAI's API at this address")
	aborts := flag.String("aborts", "", "with -serve: file for the times at which requests were aborted")
	flag.StringVar(&p.target, "target", "", "URL of an API of OpenAI, or host:port of an inference worker")
	flag.StringVar(&p.model, "model", "scripted", "model of the requests")
	flag.IntVar(&p.streams, "streams", 1, "clients")
	flag.IntVar(&p.requests, "requests", 4, "requests of each client, one after another")
	flag.IntVar(&p.tokens, "tokens", 32, "tokens of a completion")
	flag.DurationVar(&p.pace, "pace", 20*time.Millisecond, "time between two tokens of a completion")
	flag.BoolVar(&p.sessions, "sessions", false, "name a session in each request")
	closes := flag.Int("close", 0, "instead, disconnect from this many requests after a few tokens, and report when")
	watched := flag.String("watch", "", "processes whose processor time is measured, such as gateway=12,13;worker=14")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if *serve != "" {
		return serveOpenAI(ctx, *serve, *aborts)
	}
	client, err := dial(p)
	if err != nil {
		return err
	}
	var result any
	if *closes > 0 {
		result, err = disconnect(ctx, p, client, *closes)
	} else {
		result, err = measure(ctx, p, client, watch(*watched))
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// client sends one request of a conversation, and calls token with the text of each token.
type client interface {
	complete(ctx context.Context, c *conversation, token func(text []byte)) error
}

// dial returns the client of the target.
func dial(p plan) (client, error) {
	if p.target == "" {
		return nil, errors.New("-target is missing: expected a URL or host:port")
	}
	if strings.HasPrefix(p.target, "http") {
		return newWeb(p), nil
	}
	return newDirect(p)
}
