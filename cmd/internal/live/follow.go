package live

import (
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/client"
	"github.com/rollout-rl/rollout/libs/exit"
	"github.com/rollout-rl/rollout/libs/paging"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

const (
	// lateEvents is how long to wait for events after the final status: they arrive on another stream.
	lateEvents = 3 * time.Second
	// tries is the number of health checks after a broken stream; each takes at most tryTimeout +
	// retryDelay.
	tries      = 5
	tryTimeout = time.Second
	retryDelay = 200 * time.Millisecond
	// takeover is the minimum time to wait for a replica to take over: a lease expires, the replica
	// registers.
	takeover    = 20 * time.Second
	historyPage = 1000
)

// Update is one message of Follow. Exactly one field is set.
type Update struct {
	Status  *runv1.RunStatus
	Event   *eventv1.Event
	History []*eventv1.Event // stored events
	Err     error            // the last update, after a failure
	Done    bool             // the last update, when the run is over
}

// Follow streams a run until it is over or ctx ends. Stored events are sent first, as History.
// Streams that break are resumed where they stopped. The channel is closed after the last update.
func Follow(ctx context.Context, c *client.Client, runID string) <-chan Update {
	out := make(chan Update)
	go func() {
		defer close(out)
		f := follower{client: c, runID: runID, out: out}
		last := Update{Done: true}
		if err := f.run(ctx); err != nil {
			last = Update{Err: err}
		}
		select {
		case out <- last:
		case <-ctx.Done():
		}
	}()
	return out
}

type follower struct {
	client *client.Client
	runID  string
	out    chan<- Update
	after  uint64 // sequence of the last event sent
}

func (f *follower) send(ctx context.Context, u Update) error {
	select {
	case f.out <- u:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *follower) run(ctx context.Context) error {
	if err := f.history(ctx); err != nil {
		return err
	}
	eventsCtx, stopEvents := context.WithCancel(ctx)
	defer stopEvents()
	events := make(chan error, 1)
	settled := make(chan struct{}) // closed when the event of the run's end has arrived
	started := false
	err := f.status(ctx, func() { // lines of events use the first status
		if !started {
			started = true
			go func() { events <- f.events(eventsCtx, settled) }()
		}
	})
	if err != nil {
		stopEvents()
		if started {
			return errors.Join(err, ended(<-events))
		}
		return err
	}
	late := time.NewTimer(lateEvents)
	defer late.Stop()
	select {
	case <-settled:
	case <-late.C:
	case err := <-events:
		return err
	}
	stopEvents()
	if err := ended(<-events); err != nil {
		return err
	}
	return ctx.Err()
}

// ended returns nil if a stream was canceled, or failed like the other stream.
func ended(err error) error {
	switch status.Code(err) {
	case codes.Canceled, codes.Unavailable:
		return nil
	}
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// history sends the stored events that are shown, in pages. Later ones come from the tail, which
// begins after the newest event that is stored now.
func (f *follower) history(ctx context.Context) error {
	newest, err := f.client.Events.ListEvents(ctx, &storagev1.ListEventsRequest{
		Filter: &storagev1.EventFilter{RunId: f.runID, MinLevel: eventv1.Level_LEVEL_INFO}, PageSize: 1, Newest: true,
	})
	if err != nil {
		return err
	}
	for _, e := range newest.GetEvents() {
		f.after = e.GetSequence()
	}
	shown := &storagev1.EventFilter{RunId: f.runID, MinLevel: eventv1.Level_LEVEL_INFO, Kinds: []string{"step.committed", "eval.finished", "snapshot.created", "run.state"}}
	return paging.All(func(token string) (string, error) {
		page, err := f.client.Events.ListEvents(ctx, &storagev1.ListEventsRequest{Filter: shown, PageSize: historyPage, PageToken: token})
		if err != nil {
			return "", err
		}
		list, next := page.GetEvents(), page.GetNextPageToken()
		if n := len(list); n > 0 && list[n-1].GetSequence() >= f.after {
			next = ""
		}
		list = slices.DeleteFunc(list, func(e *eventv1.Event) bool { return e.GetSequence() > f.after })
		return next, f.send(ctx, Update{History: list})
	})
}

// status follows the run until it is over; sent is called after each status.
func (f *follower) status(ctx context.Context, sent func()) error {
	return Watch(ctx, f.client, f.runID, func(status *runv1.RunStatus) error {
		if err := f.send(ctx, Update{Status: status}); err != nil {
			return err
		}
		sent()
		return nil
	})
}

// events follows the events until ctx ends; settled is closed when the event of the run's end has
// arrived.
func (f *follower) events(ctx context.Context, settled chan struct{}) error {
	filter := &storagev1.EventFilter{RunId: f.runID, AfterSequence: f.after, MinLevel: eventv1.Level_LEVEL_INFO}
	return Tail(ctx, f.client, filter, func(e *eventv1.Event) error {
		if err := f.send(ctx, Update{Event: e}); err != nil {
			return err
		}
		if attributes := e.GetAttributes(); e.GetKind() == "run.state" && Over(&runv1.Run{
			State: runv1.RunState(runv1.RunState_value["RUN_STATE_"+attributes["state"]]), Reason: attributes["reason"],
		}) {
			select {
			case <-settled:
			default:
				close(settled)
			}
		}
		return nil
	})
}

// Tail calls visit with the stored events of a filter in order, then with new ones, until ctx ends.
// It resumes a broken stream after its last event, so that visit gets each event once.
func Tail(ctx context.Context, c *client.Client, filter *storagev1.EventFilter, visit func(*eventv1.Event) error) error {
	filter = proto.CloneOf(filter)
	return retry(ctx, c, filter.GetRunId(), func(progress func()) error {
		stream, err := c.Events.TailEvents(ctx, &storagev1.TailEventsRequest{Filter: filter})
		if err != nil {
			return err
		}
		for {
			response, err := stream.Recv()
			if err != nil {
				return broken(err)
			}
			progress()
			for _, e := range response.GetEvents() {
				if err := visit(e); err != nil {
					return err
				}
				filter.AfterSequence = e.GetSequence()
			}
		}
	})
}

// Watch calls visit with the status of a run, and after each change, until the run is over or ctx
// ends.
func Watch(ctx context.Context, c *client.Client, runID string, visit func(*runv1.RunStatus) error) error {
	return retry(ctx, c, runID, func(progress func()) error {
		stream, err := c.Scheduler.WatchRun(ctx, &runv1.WatchRunRequest{RunId: runID})
		if err != nil {
			return err
		}
		for {
			response, err := stream.Recv()
			if err != nil {
				return broken(err)
			}
			progress()
			if err := visit(response.GetStatus()); err != nil {
				return err
			}
			if Over(response.GetStatus().GetRun()) {
				return io.EOF
			}
		}
	})
}

// broken returns the error of a stream; a server that stops may end it without one.
func broken(err error) error {
	if errors.Is(err, io.EOF) {
		return status.Error(codes.Unavailable, "the server ended the stream before the run had ended")
	}
	return err
}

// retry restarts a stream while the server is unavailable for a short time. io.EOF is success.
func retry(ctx context.Context, c *client.Client, runID string, stream func(progress func()) error) error {
	left, lost := tries, time.Time{}
	for {
		err := stream(func() { left, lost = tries, time.Time{} })
		switch {
		case err == nil || errors.Is(err, io.EOF):
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case status.Code(err) != codes.Unavailable:
			return err
		}
		if lost.IsZero() {
			lost = time.Now()
		}
		for ; ; left-- {
			if left <= 0 && (!c.Replicated || time.Since(lost) > takeover) {
				return exit.New(exit.Unavailable, "see `rollout daemon status` and the log of the daemon, then continue with `rollout run --resume "+runID+"`",
					"the connection to the control plane was lost while the run was active: it was stopped or has failed")
			}
			if answers(ctx, c) {
				left--
				break
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
	}
}

// answers reports whether the server answers a health check within tryTimeout.
func answers(ctx context.Context, c *client.Client) bool {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	_, err := c.Health(ctx, "scheduler", "")
	<-time.After(retryDelay)
	return err == nil
}
