// Command submit plans a configuration, runs it, and follows it to its end. It is a separate module
// and needs only the contracts of rollout:
//
//	go run . -state ~/.local/state/rollout ../../addition/grpo.toml
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

func main() {
	state := flag.String("state", os.Getenv("ROLLOUT_STATE_DIR"), "state folder of the local rolloutd")
	var set overrides
	flag.Var(&set, "set", "override of one field, a.b=VALUE; may be repeated")
	flag.Parse()
	if err := submit(context.Background(), *state, flag.Arg(0), set); err != nil {
		fmt.Fprintln(os.Stderr, "submit:", err)
		os.Exit(1)
	}
}

type overrides []string

func (o *overrides) String() string     { return strings.Join(*o, " ") }
func (o *overrides) Set(v string) error { *o = append(*o, v); return nil }

func submit(ctx context.Context, state, config string, set []string) error {
	conn, ctx, err := dial(ctx, state)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	text, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	path, err := filepath.Abs(config)
	if err != nil {
		return err
	}
	base := filepath.Dir(path)
	planned, err := planv1.NewPlannerServiceClient(conn).CreatePlan(ctx, &planv1.CreatePlanRequest{
		Source: &planv1.ConfigSource{Toml: text, File: config, BaseDir: base, Set: set},
	})
	if err != nil {
		return fmt.Errorf("plan: %w", err)
	}
	for _, p := range planned.GetProblems() {
		fmt.Fprintf(os.Stderr, "%s:%d:%d: %s (%s)\n", p.GetFile(), p.GetLine(), p.GetColumn(), p.GetMessage(), p.GetFix())
	}
	if planned.GetPlan() == nil {
		return fmt.Errorf("%d problems in %s", len(planned.GetProblems()), config)
	}
	scheduler := runv1.NewSchedulerServiceClient(conn)
	created, err := scheduler.CreateRun(ctx, &runv1.CreateRunRequest{Lock: planned.GetLock(), BaseDir: base})
	if err != nil {
		return fmt.Errorf("create run: %w", err)
	}
	return follow(ctx, scheduler, created.GetRun().GetRunId())
}

func follow(ctx context.Context, scheduler runv1.SchedulerServiceClient, id string) error {
	stream, err := scheduler.WatchRun(ctx, &runv1.WatchRunRequest{RunId: id})
	if err != nil {
		return fmt.Errorf("watch %s: %w", id, err)
	}
	var last *runv1.Run
	for {
		update, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("watch %s: %w", id, err)
		}
		run := update.GetStatus().GetRun()
		if last == nil || run.GetStep() != last.GetStep() || run.GetState() != last.GetState() {
			fmt.Printf("%s %s step %d/%d\n", id, run.GetState(), run.GetStep(), run.GetTotalSteps())
		}
		last = run
	}
	if last.GetState() != runv1.RunState_RUN_STATE_SUCCEEDED {
		return fmt.Errorf("%s ended as %s: %s", id, last.GetState(), last.GetMessage())
	}
	return nil
}

// dial reads the address and the token of the local daemon.
func dial(ctx context.Context, state string) (*grpc.ClientConn, context.Context, error) {
	raw, err := os.ReadFile(filepath.Join(state, "rolloutd.json"))
	if err != nil {
		return nil, nil, fmt.Errorf("no running rolloutd (start one with `rollout daemon start`): %w", err)
	}
	var daemon struct {
		GRPC      string `json:"grpc"`
		TokenFile string `json:"token_file"`
	}
	if err := json.Unmarshal(raw, &daemon); err != nil {
		return nil, nil, fmt.Errorf("read rolloutd.json: %w", err)
	}
	token, err := os.ReadFile(daemon.TokenFile)
	if err != nil {
		return nil, nil, err
	}
	conn, err := grpc.NewClient(daemon.GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()))
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+strings.TrimSpace(string(token)))
	return conn, ctx, err
}
