package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/rollout-rl/rollout/libs/paging"
	workers "github.com/rollout-rl/rollout/libs/worker"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
	"github.com/rollout-rl/rollout/services/gateway/agent"
	"github.com/rollout-rl/rollout/services/gateway/anthropic"
	"github.com/rollout-rl/rollout/services/gateway/edge"
	"github.com/rollout-rl/rollout/services/gateway/openai"
	"github.com/rollout-rl/rollout/services/gateway/sglang"
	"github.com/rollout-rl/rollout/services/gateway/vllm"
)

// Server is the gRPC edge, and the owner of the HTTP one.
type Server struct {
	gatewayv1.UnimplementedRolloutGatewayServiceServer
	svc      *service
	agents   *agents
	http     *http.Server
	listener net.Listener
	secure   bool
}

// New makes the service and opens its HTTP listener, so that URL is known. It serves nothing before
// Run.
func New(cfg Config, deps Deps) (*Server, error) {
	if err := deps.check(); err != nil {
		return nil, err
	}
	if cfg.Address == "" {
		cfg.Address = "127.0.0.1:0"
	}
	if cfg.BodyTimeout == 0 {
		cfg.BodyTimeout = time.Minute
	}
	workers := newDirectory(deps)
	metrics, err := newMetrics(deps.Meters, workers)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	listener, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	svc := &service{Deps: deps, queueTimeout: cmp.Or(cfg.QueueTimeout, DefaultQueueTimeout), workers: workers, metrics: metrics}
	front := &edge.Edge{Options: edge.Options{
		Backend: svc, Responses: deps.Store, Keys: cfg.Keys, TrustOwner: cfg.TrustOwner, BodyTimeout: cfg.BodyTimeout, Log: deps.Log, Now: deps.Now,
	}}
	s := &Server{
		svc: svc, listener: listener, secure: cfg.TLS != nil,
		http: &http.Server{
			ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, ConnContext: edge.WithPeer,
		},
	}
	s.agents = &agents{
		store: deps.Store, work: deps.Work, buffer: deps.Buffer, runs: deps.Runs, url: s.URL(), log: deps.Log, now: deps.Now, known: map[string]*agentRun{},
		serves: func(run string) bool {
			_, _, err := svc.workers.resolve(context.Background(), run)
			return err == nil
		},
	}
	svc.agents = s.agents
	s.http.Handler = handler(front, s)
	if s.secure {
		s.http.TLSConfig = cfg.TLS.Public("h2", "http/1.1") // clients of the OpenAI API have a key and no client certificate
	}
	return s, nil
}

// handler serves all dialects.
func handler(e *edge.Edge, sessions agent.Sessions) http.Handler {
	routes := slices.Concat(openai.Routes(e), anthropic.Routes(e), vllm.Routes(e), sglang.Routes(e), agent.Routes(sessions), []edge.Route{e.Health()})
	return e.Handler(append(append(routes, e.Docs(routes)...), e.Playground())...)
}

// URL is the URL of the HTTP listener, such as "http://127.0.0.1:8000".
func (s *Server) URL() string {
	if s.secure {
		return "https://" + s.listener.Addr().String()
	}
	return "http://" + s.listener.Addr().String()
}

func (s *Server) serveHTTP() error {
	if s.secure {
		return s.http.ServeTLS(s.listener, "", "")
	}
	return s.http.Serve(s.listener)
}

// Register adds the services to a gRPC server.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	gatewayv1.RegisterRolloutGatewayServiceServer(r, s)
	k := &keys{store: s.svc.Store, now: s.svc.Now}
	keyv1.RegisterApiKeyServiceServer(r, k)
	keyv1.RegisterApiKeyInternalServiceServer(r, k)
}

// verifyRetry is the pause after the scheduler did not verify the registrations of workers.
const verifyRetry = time.Second

// Run serves HTTP and follows the registry until ctx ends. Requests in flight then have ten seconds
// to finish.
func (s *Server) Run(ctx context.Context) error {
	defer func() { _ = s.svc.metrics.gauges.Unregister() }()
	var wg sync.WaitGroup
	defer wg.Wait()
	follow, cancel := context.WithCancel(context.WithoutCancel(ctx))
	launched := workers.Launched{Registry: s.svc.Registry, Scheduler: s.svc.Scheduler, Retry: verifyRetry}
	instances := launched.Watch(follow, workers.Inference.Service())
	wg.Go(func() { s.svc.workers.serve(follow, instances) })
	wg.Go(func() { s.svc.expire(ctx) })
	if s.agents.runs != nil {
		wg.Go(func() { s.agents.serve(ctx) })
	}
	defer cancel()
	failed := make(chan error, 1)
	wg.Go(func() { failed <- s.serveHTTP() })
	select {
	case err := <-failed:
		return fmt.Errorf("gateway: %w", err)
	case <-ctx.Done():
	}
	grace, end := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer end()
	if err := s.http.Shutdown(grace); err != nil {
		return errors.Join(err, s.http.Close())
	}
	s.svc.workers.close(grace) // waits for gRPC requests
	return nil
}

// Rows of a page, where a request does not choose.
const (
	defaultModels   = 100
	defaultSegments = 1000
)

// ListModels implements the contract.
func (s *Server) ListModels(ctx context.Context, req *gatewayv1.ListModelsRequest) (*gatewayv1.ListModelsResponse, error) {
	var name, run string
	if token := req.GetPageToken(); token != "" {
		cut := strings.LastIndexByte(token, '/') // an id has none
		if cut < 0 {
			return nil, paging.ErrToken(token)
		}
		name, run = token[:cut], token[cut+1:]
	}
	before := func(m *gatewayv1.Model) bool {
		return cmp.Or(cmp.Compare(m.GetName(), name), cmp.Compare(m.GetRunId(), run)) <= 0
	}
	resp := &gatewayv1.ListModelsResponse{}
	resp.Models, resp.NextPageToken = paging.After(s.svc.Models(ctx), before, paging.Size(req.GetPageSize(), defaultModels),
		func(m *gatewayv1.Model) string { return m.GetName() + "/" + m.GetRunId() })
	return resp, nil
}

// Complete implements the contract.
func (s *Server) Complete(req *gatewayv1.CompleteRequest, stream grpc.ServerStreamingServer[gatewayv1.CompleteResponse]) error {
	return s.svc.Complete(stream.Context(), req, stream.Send)
}

// GetSession implements the contract.
func (s *Server) GetSession(ctx context.Context, req *gatewayv1.GetSessionRequest) (*gatewayv1.GetSessionResponse, error) {
	first, err := paging.Number(req.GetPageToken())
	if err != nil {
		return nil, err
	}
	session, err := s.svc.Session(ctx, req.GetSessionId(), int(first))
	if err != nil {
		return nil, err
	}
	size := paging.Size(req.GetPageSize(), defaultSegments)
	session.Segments, session.NextPageToken = paging.Cut(session.GetSegments(), size, func(*Segment) string {
		return strconv.Itoa(int(first) + size)
	})
	return session, nil
}

// NextPrompts implements the contract.
func (s *Server) NextPrompts(ctx context.Context, req *gatewayv1.NextPromptsRequest) (*gatewayv1.NextPromptsResponse, error) {
	model := req.GetModel()
	if model == "" {
		var err error
		if model, _, err = s.svc.workers.resolve(ctx, ""); err != nil {
			return nil, err
		}
	}
	return s.agents.Next(ctx, model, int(req.GetMaxGroups()), time.Duration(req.GetWaitSeconds()*float64(time.Second)))
}

// DeleteRun implements the contract.
func (s *Server) DeleteRun(ctx context.Context, req *gatewayv1.DeleteRunRequest) (*gatewayv1.DeleteRunResponse, error) {
	if err := s.svc.Store.DeleteRun(ctx, req.GetRunId(), req.GetFence()); err != nil {
		return nil, err
	}
	s.agents.deleted(req.GetRunId())
	return &gatewayv1.DeleteRunResponse{}, nil
}

// CloseSession implements the contract.
func (s *Server) CloseSession(ctx context.Context, req *gatewayv1.CloseSessionRequest) (*gatewayv1.CloseSessionResponse, error) {
	end, err := s.agents.Close(ctx, req)
	if err != nil {
		return nil, err
	}
	return &gatewayv1.CloseSessionResponse{End: end}, nil
}
