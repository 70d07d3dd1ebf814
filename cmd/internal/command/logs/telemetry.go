package logs

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

func telemetryCommand(env *cli.Env) *cobra.Command {
	request := &storagev1.QueryTelemetryRequest{}
	var since string
	var every uint32
	var workers []string
	cmd := &cobra.Command{
		Use:   "telemetry RUN",
		Short: "Show what workers report every second, such as tokens per second",
		Long: `Show what workers report every second, such as tokens per second: mean, minimum, and maximum. Older reports are kept in coarser
buckets: by default each second for an hour, ten seconds for a day, then five minutes (retention.telemetry_recent_minutes and
retention.telemetry_fine_hours of rolloutd). ` + cli.RunHelp + `

` + cli.FolderHelp,
		Example: `  rollout logs telemetry addition-grpo
  rollout logs telemetry addition-grpo --since 10m --every 10 --worker inference-0 --name tokens_per_second
  rollout logs telemetry addition-grpo --since 2h --format json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			start, err := sinceTime(since, time.Now())
			if err != nil {
				return err
			}
			request.Since, request.ResolutionSeconds = start, every
			for _, worker := range workers {
				if !strings.Contains(worker, "/") {
					worker = "inference-worker/" + worker
				}
				request.Services = append(request.Services, worker)
			}
			return env.Plane.Browse(cmd, func(ctx context.Context, r record.Reader) error {
				got, err := r.Run(ctx, args[0])
				if err != nil {
					return err
				}
				request.RunId = got.GetRun().GetRunId()
				return showTelemetry(ctx, env, r, request, got.GetRun().GetName())
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&since, "since", "", "only since this `time`: a duration ago (10m) or a time (2006-01-02T15:04:05Z)")
	f.Uint32Var(&every, "every", 60, "`seconds` of a line, at least; 0: as stored")
	f.StringSliceVar(&workers, "worker", nil, "only of these `workers`, such as inference-0")
	f.StringSliceVar(&request.Names, "name", nil, "only these `names`, such as tokens_per_second")
	return cmd
}

func showTelemetry(ctx context.Context, env *cli.Env, r record.Reader, request *storagev1.QueryTelemetryRequest, run string) error {
	series, err := r.Telemetry(ctx, request)
	if err != nil {
		return err
	}
	if env.JSON() {
		for _, s := range series {
			if err := output.Line(env.Stdout, "", s); err != nil {
				return err
			}
		}
		return nil
	}
	if len(series) == 0 {
		env.Note("run %s has no matching telemetry", run)
		return nil
	}
	style := env.Style()
	var table output.Table
	table.Row(style.Bold("TIME"), style.Bold("SECONDS"), style.Bold("WORKER"), style.Bold("NAME"), style.Bold("MEAN"), style.Bold("MIN"), style.Bold("MAX"))
	for _, s := range series {
		_, worker, _ := strings.Cut(s.GetService(), "/")
		for _, b := range s.GetBuckets() {
			table.Row(env.Time(b.GetTime().AsTime()), fmt.Sprint(b.GetSeconds()), worker, s.GetName(), figure(b.GetMean()), figure(b.GetMin()), figure(b.GetMax()))
		}
	}
	_, err = io.WriteString(env.Stdout, table.String())
	return err
}

func figure(v float64) string { return fmt.Sprintf("%.6g", v) }

// sinceTime reads --since: a duration ago, or a time; nil if it is empty.
func sinceTime(text string, now time.Time) (*timestamppb.Timestamp, error) {
	if text == "" {
		return nil, nil
	}
	if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
		return timestamppb.New(now.Add(-ago)), nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime, time.DateOnly} {
		if t, err := time.ParseInLocation(layout, text, time.Local); err == nil {
			return timestamppb.New(t), nil
		}
	}
	return nil, cli.Usage("invalid argument %q for --since: must be a duration such as 10m or a time such as 2006-01-02T15:04:05Z", text)
}
