// Package edge serves HTTP for the dialects of the gateway: it checks keys, hosts, and sizes,
// decodes requests, collects the pieces of completions, and writes responses and server-sent
// events. A dialect (packages openai, anthropic, sglang, vllm) is a list of routes that translate
// between its JSON and the gateway's contract.
//
// What all dialects share:
//   - A key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`.
//   - A request names its session with the header X-Session-ID or x-rollout-session, the URL prefix
//     /sessions/{id}, or the field session_id. Without one it gets a new session. The response has
//     the session in the header x-rollout-session.
//   - `weights_version` (or the header x-rollout-weights-version) pins a weights version,
//     `min_weights_version` (or x-rollout-min-weights-version) waits for one.
//   - A response has the newest weights version in the header x-rollout-weights-version; a stream
//     the version of its first token. `weight_versions` lists the spans of each completion.
//   - An error has our `reason` and `fix` inside the error object of its dialect.
//
// Text stays in the worker: this package never tokenizes, renders, or parses completions.
package edge

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/id"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

const maxBody = 16 << 20 // bytes of a request

// Backend serves completions.
type Backend interface {
	// Models returns the policies that are served now.
	Models(ctx context.Context) []*gatewayv1.Model
	// Complete calls send for each piece when it arrives.
	Complete(ctx context.Context, req *gatewayv1.CompleteRequest, send func(*gatewayv1.CompleteResponse) error) error
	// Messages returns the messages of a session up to the completion of a request, each as JSON in
	// the form of OpenAI.
	Messages(ctx context.Context, session, request string) ([]string, error)
	// Tokenize returns the token ids of prompts for a policy; "" is the only one.
	Tokenize(ctx context.Context, model string, req *inferencev1.TokenizeRequest) (*inferencev1.TokenizeResponse, error)
	// Detokenize returns the texts of token ids.
	Detokenize(ctx context.Context, model string, req *inferencev1.DetokenizeRequest) (*inferencev1.DetokenizeResponse, error)
}

// Responses keeps the responses of the Responses API. Errors are NOT_FOUND for an unknown id.
type Responses interface {
	KeepResponse(ctx context.Context, r *StoredResponse) error
	Response(ctx context.Context, id string) (*StoredResponse, error)
	DeleteResponse(ctx context.Context, id string) error
}

// StoredResponse is a response that a client can read again and continue.
type StoredResponse struct {
	ID      string
	Session string
	Body    []byte // JSON, as the client received it
	Input   []byte // JSON, the list of the items of its input
}

// Options are the dependencies of the edge.
type Options struct {
	Backend    Backend
	Responses  Responses
	Keys       *apikey.Ring // nil: no key is needed
	TrustOwner bool         // the user of this process and root need no key over loopback
	// BodyTimeout is how long a request may take to send its body.
	BodyTimeout time.Duration
	Log         *slog.Logger
	Now         func() time.Time
}

// Edge serves routes.
type Edge struct{ Options }

// Route is one endpoint.
type Route struct {
	Method string
	Path   string // pattern of http.ServeMux without a method
	Tag    string // dialect, for the documentation
	About  string // what it does, for the documentation
	// Request is a zero value of what the body is decoded into; nil: the request has none.
	Request any
	// Required are the fields that every request has.
	Required []string
	Serve    func(w http.ResponseWriter, r *http.Request) error
	// Body returns the JSON of an error in the dialect of the route.
	Body func(e *Error) any
	// Session reports whether /sessions/{session}/... serves the route too.
	Session bool
	// Open reports whether the route needs no key.
	Open bool
	// Scope is what a key needs. "": apikey.Any for GET, apikey.Sample for other methods.
	Scope apikey.Scope
}

// Handler serves the routes. Routes of one path have the same Body.
func (e *Edge) Handler(routes ...Route) http.Handler {
	mux := http.NewServeMux()
	byPath := map[string][]Route{}
	var paths []string
	for _, route := range routes {
		if byPath[route.Path] == nil {
			paths = append(paths, route.Path)
		}
		byPath[route.Path] = append(byPath[route.Path], route)
	}
	for _, path := range paths {
		serve := func(w http.ResponseWriter, r *http.Request) { e.serve(w, r, byPath[path]) }
		mux.HandleFunc(path, serve)
		if byPath[path][0].Session {
			mux.HandleFunc("/sessions/{session}"+path, serve)
		}
	}
	if byPath["/"] == nil {
		mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			e.fail(w, r, PlainBody, &Error{
				Status: http.StatusNotFound, Code: "unknown_url", Message: "unknown request URL: " + r.Method + " " + r.URL.Path,
				Fix: "the URLs are " + strings.NewReplacer("...}", "}", "{$}", "").Replace(strings.Join(paths, ", ")),
			})
		})
	}
	return traced(mux)
}

// requestKey is the context key of the id of a request.
type requestKey struct{}

// Health is the route that reports that the gateway serves, even if it has no policy.
func (e *Edge) Health() Route {
	return Route{Method: http.MethodGet, Path: "/health", Tag: "gateway", About: "Whether the gateway serves.", Body: PlainBody, Open: true, Serve: func(w http.ResponseWriter, _ *http.Request) error {
		return WriteJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	}}
}

// serve calls the route of the method, and responds with its error. The response and the log have
// the id of the request, in the headers of both OpenAI's and Anthropic's clients.
func (e *Edge) serve(w http.ResponseWriter, r *http.Request, routes []Route) {
	request := id.New(e.Now())
	w.Header().Set("x-request-id", "req-"+request)
	w.Header().Set("request-id", "req-"+request)
	r = r.WithContext(context.WithValue(r.Context(), requestKey{}, request))
	var allowed []string
	for _, route := range routes {
		if r.Method != route.Method && (r.Method != http.MethodHead || route.Method != http.MethodGet) {
			allowed = append(allowed, route.Method)
			continue
		}
		key, err := e.admit(w, r, route)
		if err != nil {
			e.fail(w, r, route.Body, err)
			return
		}
		if key != nil {
			r = r.WithContext(apikey.With(r.Context(), key))
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		if err := route.Serve(w, r); err != nil {
			e.fail(w, r, route.Body, err)
		}
		return
	}
	methods := strings.Join(allowed, ", ")
	w.Header().Set("Allow", strings.ReplaceAll(methods, "GET", "GET, HEAD"))
	e.fail(w, r, routes[0].Body, &Error{
		Status: http.StatusMethodNotAllowed, Code: "method_not_supported",
		Message: "method " + r.Method + " is not allowed on " + r.URL.Path, Fix: "use " + methods,
	})
}

// admit checks the key, and returns it; nil if the request needs none. A valid key's scope counts
// for the owner too. Without a valid key, a loopback request must be meant for this host.
func (e *Edge) admit(w http.ResponseWriter, r *http.Request, route Route) (*apikey.Record, error) {
	// A client that sends its body too slowly holds no connection.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(e.BodyTimeout))
	if e.Keys == nil || route.Open {
		return nil, local(r)
	}
	key, err := e.Keys.Find(r.Context(), sentKey(r))
	if key == nil && err == nil && e.TrustOwner && fromOwner(r.Context()) {
		return nil, local(r)
	}
	if key == nil || err != nil {
		w.Header().Set("WWW-Authenticate", "Bearer")
		if err == nil {
			err = e.noKey(r.Context())
		}
		return nil, err
	}
	needed := route.Scope
	if needed == "" {
		needed = apikey.Sample
		if route.Method == http.MethodGet {
			needed = apikey.Any
		}
	}
	if !apikey.Scope(key.GetScope()).Allows(needed) {
		return nil, &Error{
			Status: http.StatusForbidden, Code: "insufficient_permissions",
			Message: "the API key " + key.GetName() + " has the scope " + key.GetScope() + ", but this request needs " + string(needed),
			Fix:     "use a key with that scope (`rollout keys create NAME --scope " + string(needed) + "`)",
		}
	}
	return key, nil
}

// sentKey returns the key of a request, in the header of OpenAI's or of Anthropic's clients.
func sentKey(r *http.Request) string {
	if key, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok {
		return key
	}
	return r.Header.Get("x-api-key")
}
