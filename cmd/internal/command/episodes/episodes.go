// Package episodes has the commands `rollout episodes ...`.
package episodes

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/output"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/paging"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

const (
	fromHelp = "FROM is a run that trains, or a snapshot of kind episodic."
	nameHelp = "EPISODE is EPOCH/INDEX/SAMPLE, as `rollout episodes list` prints it."
)

// Command returns `rollout episodes`.
func Command(env *cli.Env) *cobra.Command {
	cmd := cli.Group("episodes", "List, show, replay and branch open episodes", listCommand(env), showCommand(env), replayCommand(env), branchCommand(env))
	cmd.Long = "List, show, replay and branch open episodes: those of a run that trains, after their last completed turn, and those of snapshots of kind\n" +
		"episodic. Episodes are saved if their environment has the methods `state_dict` and `load_state_dict` (docs/environments.md)."
	cmd.Example = "  rollout episodes list guess\n  rollout episodes branch guess 0/18/2 --branches 4"
	return cmd
}

// episodesPage is how many episodes are requested at a time: they have all their tokens.
const episodesPage = 100

func listCommand(env *cli.Env) *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:     "list FROM",
		Short:   "List open episodes",
		Long:    "List open episodes, by group and sample. " + fromHelp,
		Example: "  rollout episodes list guess\n  rollout episodes list snap-01kapq5q5m --format json",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				request, _, err := source(ctx, c, args[0])
				if err != nil {
					return err
				}
				response := &snapshotv1.ListEpisodesResponse{}
				_, err = paging.Some(limit, episodesPage, func(size int, token string) (int, string, error) {
					request.PageSize, request.PageToken = uint32(size), token
					page, err := c.Snapshot.ListEpisodes(ctx, request)
					response.Episodes, response.NextPageToken = append(response.Episodes, page.GetEpisodes()...), page.GetNextPageToken()
					return len(page.GetEpisodes()), page.GetNextPageToken(), err
				})
				if err != nil {
					return err
				}
				return env.Message(response, func() string { return listText(env, response) })
			})
		},
	}
	cmd.Flags().IntVarP(&limit, "limit", "n", 100, "maximum `number` of episodes; 0: all")
	return cmd
}

func listText(env *cli.Env, response *snapshotv1.ListEpisodesResponse) string {
	if len(response.GetEpisodes()) == 0 {
		return "no saved episodes: none has completed a turn, or their environment has no method `state_dict`\n"
	}
	s := env.Style()
	var table output.Table
	table.Row(s.Bold("EPISODE"), s.Bold("ATTEMPT"), s.Bold("TURNS"), s.Bold("TOKENS"), s.Bold("WORKER"), s.Bold("SAVED"))
	for _, e := range response.GetEpisodes() {
		table.Row(nameOf(e.GetKey()), output.Count(uint64(e.GetKey().GetAttempt())), output.Count(uint64(e.GetTurns())),
			output.Count(uint64(len(e.GetTrajectory().GetTokenIds())/4)), e.GetWorkerId(), env.Time(e.GetSaveTime().AsTime()))
	}
	return table.String() + output.More("episodes", response.GetNextPageToken())
}

func showCommand(env *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use:     "show FROM EPISODE",
		Short:   "Show an open episode turn by turn",
		Long:    "Show an open episode turn by turn, and the state of its environment. " + fromHelp + " " + nameHelp,
		Example: "  rollout episodes show guess 0/18/2",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return env.Plane.With(cmd, func(ctx context.Context, c *client.Client) error {
				episode, _, err := find(ctx, c, args[0], args[1])
				if err != nil {
					return err
				}
				return env.Message(episode, func() string { return episodeText(env, episode) })
			})
		},
	}
}

func episodeText(env *cli.Env, e *snapshotv1.Episode) string {
	s := env.Style()
	var out strings.Builder
	fmt.Fprintf(&out, "%s  attempt %d, %s, saved %s\n", s.Bold(nameOf(e.GetKey())), e.GetKey().GetAttempt(), output.Plural(int(e.GetTurns()), "turn"), env.Time(e.GetSaveTime().AsTime()))
	number := 0
	for _, turn := range e.GetTrajectory().GetTurns() {
		text := turn.GetText()
		if len(turn.GetMessages()) > 0 {
			text = said(turn.GetMessages())
		}
		if !turn.GetSampled() {
			fmt.Fprintf(&out, "  %s  %q\n", s.Dim("environment"), text)
			continue
		}
		number++
		fmt.Fprintf(&out, "  %s  %q  %s\n", s.Cyan(fmt.Sprintf("policy, turn %d", number)), text, s.Dim("reward "+output.Number(turn.GetReward())))
	}
	fmt.Fprintf(&out, "  %s  %s\n", s.Dim("state"), e.GetEnvironmentState())
	return out.String()
}

// said is the content of messages; the whole message if it has more than a text.
func said(messages []string) string {
	var lines []string
	for _, message := range messages {
		var fields map[string]any
		_ = json.Unmarshal([]byte(message), &fields) // it is shown as it is
		text, ok := fields["content"].(string)
		if delete(fields, "role"); !ok || len(fields) > 1 {
			text = message
		}
		lines = append(lines, text)
	}
	return strings.Join(lines, "\n")
}

func nameOf(key *trajectoryv1.TrajectoryKey) string {
	return fmt.Sprintf("%d/%d/%d", key.GetEpoch(), key.GetIndex(), key.GetSample())
}

// source returns the request for the episodes of a run or a snapshot, and the snapshot, or nil.
func source(ctx context.Context, c *client.Client, from string) (*snapshotv1.ListEpisodesRequest, *snapshotv1.Snapshot, error) {
	if strings.HasPrefix(from, "snap-") {
		got, err := c.Snapshot.GetSnapshot(ctx, &snapshotv1.GetSnapshotRequest{SnapshotId: from})
		return &snapshotv1.ListEpisodesRequest{SnapshotId: got.GetSnapshot().GetSnapshotId()}, got.GetSnapshot(), err
	}
	got, err := c.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: from})
	return &snapshotv1.ListEpisodesRequest{RunId: got.GetStatus().GetRun().GetRunId()}, nil, err
}

// find returns an episode of a run or a snapshot.
func find(ctx context.Context, c *client.Client, from, name string) (*snapshotv1.Episode, *snapshotv1.Snapshot, error) {
	var group snapshotv1.EpisodeGroup
	var sample uint32
	if n, err := fmt.Sscanf(name, "%d/%d/%d", &group.Epoch, &group.Index, &sample); err != nil || n != 3 {
		return nil, nil, cli.Usage("%q is not an episode: write EPOCH/INDEX/SAMPLE, for example 0/18/2", name)
	}
	request, snapshot, err := source(ctx, c, from)
	if err != nil {
		return nil, nil, err
	}
	request.Groups = []*snapshotv1.EpisodeGroup{&group}
	response, err := c.Snapshot.ListEpisodes(ctx, request)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range response.GetEpisodes() {
		if e.GetKey().GetSample() == sample {
			return e, snapshot, nil
		}
	}
	return nil, nil, exit.New(exit.NoInput, "`rollout episodes list "+from+"` lists those that are open; the episodes of finished groups are in `rollout completions`",
		"%s has no open episode %s with a completed turn", from, name)
}
