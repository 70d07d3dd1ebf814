package storage

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/paging"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
	storagev1 "github.com/rollout-rl/rollout/proto/gen/rollout/storage/v1"
)

// Server is the gRPC edge of the artifact service and the event service.
type Server struct {
	storagev1.UnimplementedArtifactServiceServer
	storagev1.UnimplementedEventServiceServer
	cfg   Config
	deps  Deps
	added notifier
}

// New makes the service. It starts nothing.
func New(cfg Config, deps Deps) (*Server, error) {
	if err := deps.check(); err != nil {
		return nil, err
	}
	cfg.defaults()
	return &Server{cfg: cfg, deps: deps}, nil
}

// Register adds the services to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	storagev1.RegisterArtifactServiceServer(r, s)
	storagev1.RegisterEventServiceServer(r, s)
}

// Rows of a page, where a request does not choose.
const (
	defaultEvents = 1000
	defaultPoints = 10_000
)

// retentionEvery is the interval at which old events are deleted.
const retentionEvery = time.Hour

// retain deletes old events until ctx ends.
func (s *Server) retain(ctx context.Context) {
	tick := time.NewTicker(retentionEvery)
	defer tick.Stop()
	for {
		if err := s.deps.Store.DeleteBefore(ctx, s.deps.Now().Add(-s.cfg.EventAge)); err != nil && ctx.Err() == nil {
			s.deps.Log.WarnContext(ctx, "old events could not be deleted, which is tried again in an hour", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// downsampleEvery is the interval at which telemetry is summarized.
const downsampleEvery = time.Minute

// downsample summarizes old telemetry until ctx ends.
func (s *Server) downsample(ctx context.Context) {
	tick := time.NewTicker(downsampleEvery)
	defer tick.Stop()
	for {
		if err := s.deps.Store.Downsample(ctx, s.deps.Now(), s.tiers()); err != nil && ctx.Err() == nil {
			s.deps.Log.WarnContext(ctx, "telemetry could not be summarized, which is tried again in a minute", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (s *Server) tiers() []Tier { return Tiers(s.cfg.Recent, s.cfg.Fine) }

// Run stores the events of the stream, and summarizes or deletes old ones, until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	var wait sync.WaitGroup
	defer wait.Wait()
	wait.Go(func() { s.downsample(ctx) })
	if s.cfg.EventAge > 0 {
		wait.Go(func() { s.retain(ctx) })
	}
	if s.deps.Stream != nil {
		s.ingest(ctx)
	}
	<-ctx.Done()
	return nil
}

// AppendEvents implements the contract.
func (s *Server) AppendEvents(ctx context.Context, req *storagev1.AppendEventsRequest) (*storagev1.AppendEventsResponse, error) {
	if err := s.append(ctx, req.GetEvents()); err != nil {
		return nil, err
	}
	return &storagev1.AppendEventsResponse{}, nil
}

// ListEvents implements the contract.
func (s *Server) ListEvents(ctx context.Context, req *storagev1.ListEventsRequest) (*storagev1.ListEventsResponse, error) {
	last, err := paging.Number(req.GetPageToken())
	if err != nil {
		return nil, err
	}
	events, next, err := Page(ctx, s.deps.Store, FilterOf(req.GetFilter()), last, paging.Size(req.GetPageSize(), defaultEvents), req.GetNewest())
	if err == nil {
		events, err = s.visible(ctx, events)
	}
	if err != nil {
		return nil, err
	}
	return &storagev1.ListEventsResponse{Events: events, NextPageToken: next}, nil
}

// Page returns a page of events and the token of the next one. last is the sequence that the token
// of this page names, or 0.
func Page(ctx context.Context, store Store, f Filter, last uint64, size int, newest bool) (events []*Event, next string, err error) {
	switch {
	case newest:
		f.Before = last
	case last > 0:
		f.After = max(f.After, last)
	}
	if events, err = store.List(ctx, f, size+1, newest); err != nil || len(events) <= size {
		return events, "", err
	}
	if newest {
		events = events[1:]
		return events, sequenceOf(events[0]), nil
	}
	events = events[:size]
	return events, sequenceOf(events[size-1]), nil
}

func sequenceOf(e *Event) string { return strconv.FormatUint(e.GetSequence(), 10) }

// TailEvents implements the contract. It reads from the store, so a slow client misses nothing.
func (s *Server) TailEvents(req *storagev1.TailEventsRequest, stream grpc.ServerStreamingServer[storagev1.TailEventsResponse]) error {
	filter := FilterOf(req.GetFilter())
	for {
		more := s.added.wait()
		events, err := s.deps.Store.List(stream.Context(), filter, s.cfg.Page, false)
		if err != nil {
			return err
		}
		if len(events) > 0 {
			filter.After = events[len(events)-1].GetSequence()
			if events, err = s.visible(stream.Context(), events); err != nil {
				return err
			}
			if len(events) == 0 {
				continue
			}
			if err := stream.Send(&storagev1.TailEventsResponse{Events: events}); err != nil {
				return err
			}
			continue
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-more:
		}
	}
}

// visible drops the events of runs that the caller does not see, and those of no run.
func (s *Server) visible(ctx context.Context, events []*eventv1.Event) ([]*eventv1.Event, error) {
	if _, limited := apikey.ProjectOf(ctx); !limited || s.deps.Projects == nil {
		return events, nil
	}
	var out []*eventv1.Event
	for _, e := range events {
		sees, err := s.deps.Projects.Sees(ctx, e.GetRunId())
		if err != nil {
			return nil, err
		}
		if sees {
			out = append(out, e)
		}
	}
	return out, nil
}

// QueryMetrics implements the contract.
func (s *Server) QueryMetrics(ctx context.Context, req *storagev1.QueryMetricsRequest) (*storagev1.QueryMetricsResponse, error) {
	q := MetricQuery{Run: req.GetRunId(), Names: req.GetNames(), From: req.GetFromStep()}
	if token := req.GetPageToken(); token != "" {
		number, name, cut := strings.Cut(token, "/")
		step, err := strconv.ParseUint(number, 10, 63)
		if !cut || err != nil {
			return nil, paging.ErrToken(token)
		}
		q.After = &Point{name, step}
	}
	size := paging.Size(req.GetPageSize(), defaultPoints)
	q.Limit = size + 1
	series, err := s.deps.Store.Series(ctx, q)
	if err != nil {
		return nil, err
	}
	resp := &storagev1.QueryMetricsResponse{Series: series}
	resp.NextPageToken = cutPoints(resp, size)
	return resp, nil
}

// cutPoints removes the points after the first size of a page, and returns the token of the next
// page if there were any.
func cutPoints(page *storagev1.QueryMetricsResponse, size int) string {
	for i, s := range page.Series {
		if size -= len(s.GetPoints()); size >= 0 {
			continue
		}
		if s.Points, page.Series = s.Points[:len(s.Points)+size], page.Series[:i+1]; len(s.Points) == 0 {
			page.Series = page.Series[:i]
		}
		last := page.Series[len(page.Series)-1]
		return fmt.Sprintf("%d/%s", last.Points[len(last.Points)-1].GetStep(), last.GetName())
	}
	return ""
}

// QueryTelemetry implements the contract.
func (s *Server) QueryTelemetry(req *storagev1.QueryTelemetryRequest, stream grpc.ServerStreamingServer[storagev1.QueryTelemetryResponse]) error {
	return s.deps.Store.Telemetry(stream.Context(), TelemetryFilterOf(req), s.tiers(), func(series TelemetrySeries) error {
		return stream.Send(&storagev1.QueryTelemetryResponse{Series: series.Message()})
	})
}

// TelemetryFilterOf converts a request of the contract.
func TelemetryFilterOf(req *storagev1.QueryTelemetryRequest) TelemetryFilter {
	f := TelemetryFilter{Run: req.GetRunId(), Services: req.GetServices(), Names: req.GetNames(), Seconds: int64(req.GetResolutionSeconds())}
	if req.GetSince() != nil {
		f.Since = req.GetSince().AsTime()
	}
	if req.GetUntil() != nil {
		f.Until = req.GetUntil().AsTime()
	}
	return f
}

// Message converts a series to the contract.
func (s TelemetrySeries) Message() *storagev1.TelemetrySeries {
	out := &storagev1.TelemetrySeries{Service: s.Service, Name: s.Name}
	for _, b := range s.Buckets {
		out.Buckets = append(out.Buckets, &storagev1.TelemetryBucket{
			Time: timestamppb.New(time.Unix(b.Start, 0).UTC()), Seconds: uint32(b.Seconds), Count: b.Count, Min: b.Min, Mean: b.Mean, Max: b.Max,
		})
	}
	return out
}

// FilterOf converts a filter of the contract. nil selects all.
func FilterOf(f *storagev1.EventFilter) Filter {
	out := Filter{Run: f.GetRunId(), Services: f.GetServices(), MinLevel: f.GetMinLevel(), Kinds: f.GetKinds(), After: f.GetAfterSequence()}
	if f.GetSince() != nil {
		out.Since = f.GetSince().AsTime()
	}
	return out
}
