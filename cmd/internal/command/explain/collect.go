package explain

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/cmd/internal/daemon"
	"github.com/rollout-rl/rollout/cmd/internal/record"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/explain"
	"github.com/rollout-rl/rollout/libs/lease"
	"github.com/rollout-rl/rollout/libs/rpcerr"
	"github.com/rollout-rl/rollout/libs/wait"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
	waitv1 "github.com/rollout-rl/rollout/proto/gen/rollout/wait/v1"
)

const (
	answerTimeout = 6 * time.Second // of one service; the scheduler waits up to 2.5 s for the workers
	mostMissing   = 1000
	mostFailed    = 16
	mostFailures  = 64 // events
	logLines      = 8
	logBytes      = 16 << 10
)

// collector reads the state of a run.
type collector struct {
	env    *cli.Env
	reader record.Reader
	name   string
	events int
	runID  string // once it is known
}

// collect asks everything that knows the run. What does not answer is listed; an error is that
// there is no such run.
func (c *collector) collect(ctx context.Context) (explain.State, error) {
	s := explain.State{Time: c.env.Now().UTC(), Name: c.name}
	services, running := c.reader.(record.Services)
	s.Dead = !running
	missed := func(name string, err error) error {
		if err == nil || !silent(err) || ctx.Err() != nil {
			return err
		}
		s.Unanswered = appendNew(s.Unanswered, unanswered(name, err))
		return nil
	}
	var err error
	if running {
		s.Status, err = c.ask(ctx, services.Client)
	} else {
		s.Status, err = c.reader.Run(ctx, c.name)
	}
	if running && rpcerr.Reason(err) == client.ReasonNotFound {
		err = cmp.Or(c.leaderless(ctx, services.Client), err)
	}
	if err := missed("scheduler", err); err != nil {
		return s, err
	}
	if c.runID = s.Status.GetRun().GetRunId(); c.runID == "" && strings.HasPrefix(c.name, "run-") {
		c.runID = c.name
	}
	if running {
		c.services(ctx, services.Client, &s)
	}
	if running && c.runID != "" && !explain.Ended(s) {
		s.Missing, err = c.missing(ctx, services.Client, s.Status)
		_ = missed("buffer", err) // another error is of a run whose ledger is not open yet
	}
	if c.runID != "" {
		s.Events, err = c.lastEvents(ctx, max(c.events, 1), eventv1.Level_LEVEL_INFO) // its time is the last sign of a run
		_ = missed("storage", err)
	}
	if c.runID != "" && explain.Ended(s) {
		s.Failures, err = c.lastEvents(ctx, mostFailures, eventv1.Level_LEVEL_WARN)
		_ = missed("storage", err)
	}
	s.Time = c.env.Now().UTC()
	s.Logs = logs(s.Status)
	if running {
		s.Processes = processes(s.Unanswered, services.Client.Registry())
	}
	return s, nil
}

// unanswered names what did not answer: the service, the registry in which it is looked up, or its
// database.
func unanswered(service string, err error) *waitv1.Unanswered {
	reason := rpcerr.Reason(err)
	if e, ok := rpcerr.From(err); ok && e.Metadata()[lease.Cause] != "" {
		reason = e.Metadata()[lease.Cause]
	}
	switch {
	case reason == client.ReasonRegistry:
		service = explain.Registry
	case strings.HasPrefix(reason, "DATABASE_"):
		service = explain.Database
	}
	return &waitv1.Unanswered{Name: service, Error: exit.From(err).Error(), Fix: rpcerr.Fix(err)}
}

// appendNew adds what did not answer, once by its name.
func appendNew(all []*waitv1.Unanswered, u *waitv1.Unanswered) []*waitv1.Unanswered {
	if slices.ContainsFunc(all, func(known *waitv1.Unanswered) bool { return known.GetName() == u.GetName() }) {
		return all
	}
	return append(all, u)
}

// processes finds on this host the processes of services that did not answer: of the control plane
// whose registry this is.
func processes(unanswered []*waitv1.Unanswered, registry string) map[string]explain.Process {
	out := map[string]explain.Process{}
	if len(unanswered) == 0 || registry == "" {
		return out
	}
	for _, p := range daemon.OnHost() {
		if p.Info.Consul != registry {
			continue
		}
		for _, u := range unanswered {
			if slices.Contains(p.Info.Targets, u.GetName()) && !out[u.GetName()].Stopped { // of several replicas a stopped one
				out[u.GetName()] = explain.Process{PID: p.Info.PID, Address: p.Info.GRPC, Stopped: p.Stopped}
			}
		}
	}
	return out
}

// silent reports whether an error says that a service could not be asked.
func silent(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unimplemented, codes.ResourceExhausted:
		return true
	}
	return errors.Is(err, context.DeadlineExceeded)
}

// leaderless asks the processes of the control plane why none of them leads the scheduler; nil if
// none says.
func (c *collector) leaderless(ctx context.Context, from *client.Client) error {
	addresses := from.Addresses(ctx)
	for _, p := range daemon.OnHost() {
		asked := slices.Contains(addresses, p.Info.GRPC)
		if p.Mine && p.Info.Consul == from.Registry() && !p.Stopped && !asked { // others must not get the token
			addresses = append(addresses, p.Info.GRPC)
		}
	}
	for _, address := range addresses {
		at, err := from.At(address)
		if err != nil {
			continue
		}
		_, err = c.ask(ctx, at)
		_ = at.Close()
		if e, ok := rpcerr.From(err); ok && e.Metadata()[lease.Cause] != "" {
			return err
		}
	}
	return nil
}

func (c *collector) ask(ctx context.Context, from *client.Client) (*runv1.RunStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	got, err := from.Scheduler.GetRun(ctx, &runv1.GetRunRequest{RunId: c.name, InFlight: true})
	return got.GetStatus(), err
}

// missing returns the groups that were issued and lack samples, those of which the buffer has
// nothing included, and some of those that failed.
func (c *collector) missing(ctx context.Context, from *client.Client, status *runv1.RunStatus) ([]*bufferv1.GroupRecord, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	open, err := from.Buffer.ListIncompleteGroups(ctx, &bufferv1.ListIncompleteGroupsRequest{
		RunId: c.runID, EndPosition: status.GetCursor().GetPosition(), PageSize: mostMissing,
	})
	if err != nil || !slices.ContainsFunc(status.GetWaits(), func(w *waitv1.Wait) bool { return w.GetReason() == wait.NextAttempt }) {
		return open.GetGroups(), err
	}
	failed, err := from.Buffer.ListGroups(ctx, &bufferv1.ListGroupsRequest{
		RunId: c.runID, PageSize: mostFailed, States: []bufferv1.GroupState{bufferv1.GroupState_GROUP_STATE_DISSOLVED},
	})
	return append(open.GetGroups(), failed.GetGroups()...), err
}

// lastEvents returns the newest events from a level on, oldest first.
func (c *collector) lastEvents(ctx context.Context, most int, level eventv1.Level) ([]*eventv1.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	events, err := c.reader.Events(ctx, &storagev1.EventFilter{RunId: c.runID, MinLevel: level, Kinds: telling}, most, true)
	slices.SortStableFunc(events, func(x, y *eventv1.Event) int { return x.GetTime().AsTime().Compare(y.GetTime().AsTime()) })
	return events, err
}

// telling are the kinds of events that explain a stall. Those with numbers of every second do not.
var telling = []string{
	"log", "run.state", "step.committed", "weights.delivered", "weights.left_out", "phase", "worker.started", "worker.exited", "group.excluded",
	"snapshot.created", "eval.finished", "health.collapse", "gate.fired", "gate.no_metric", "gate.restored", "gate.not_restored",
}

// services lists the services that are unhealthy or do not answer.
func (c *collector) services(ctx context.Context, from *client.Client, s *explain.State) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	for _, target := range client.Targets {
		if slices.ContainsFunc(s.Unanswered, func(u *waitv1.Unanswered) bool { return u.GetName() == target.Name }) {
			continue
		}
		got, err := from.Health(ctx, target.Name, target.Service)
		switch {
		case status.Code(err) == codes.NotFound: // not hosted there
		case err != nil:
			s.Unanswered = appendNew(s.Unanswered, unanswered(target.Name, err))
		case got.GetStatus().String() != "SERVING":
			s.Unanswered = append(s.Unanswered, &waitv1.Unanswered{Name: target.Name, Error: "its health check fails: it is starting, or a dependency of it is unreachable"})
		}
	}
}

// logs returns the last lines of workers that do not serve, where their logs are on this host.
func logs(s *runv1.RunStatus) map[string][]string {
	out := map[string][]string{}
	for _, w := range s.GetWorkers() {
		if w.GetHealthy() {
			continue
		}
		if lines := lastLines(filepath.Join(s.GetRun().GetDirectory(), "workers", w.GetWorkerId()+".log")); len(lines) > 0 {
			out[w.GetWorkerId()] = lines
		}
	}
	return out
}

func lastLines(path string) []string {
	file, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return nil
	}
	text := make([]byte, min(info.Size(), logBytes))
	if _, err := file.ReadAt(text, info.Size()-int64(len(text))); err != nil {
		return nil
	}
	lines := strings.FieldsFunc(string(text), func(r rune) bool { return r == '\n' })
	return lines[max(0, len(lines)-logLines):]
}
