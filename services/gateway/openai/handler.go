// Package openai serves policies with the HTTP API of OpenAI: /v1/models, /v1/chat/completions, and
// /v1/completions, plain and streaming, so that OpenAI's clients work unmodified. /health needs no
// key; it reports that the gateway serves, even if it has no policy.
//
// Beyond the fields of OpenAI, a request may have top_k, min_p, and, for completions,
// prompt_logprobs as in vLLM. Fields that would change the completion and are not supported (tools,
// penalties, constraints of vLLM) are refused. Other unknown fields are ignored, as OpenAI's
// clients expect.
//
// A response has the weights version in system_fingerprint ("weights-v12") and in the header
// x-rollout-weights-version. The header of a stream has the version of the first token; the
// fingerprint of each chunk has the newest version so far. The header x-rollout-session has the
// session. A request with that header continues the session.
package openai

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/rollout-rl/rollout/libs/apikey"
	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
)

// maxBody is the largest request, in bytes.
const maxBody = 16 << 20

// Backend serves completions.
type Backend interface {
	// Models returns the policies that are served now.
	Models(ctx context.Context) []*gatewayv1.Model
	// Complete calls send for each piece when it arrives.
	Complete(ctx context.Context, req *gatewayv1.CompleteRequest, send func(*gatewayv1.CompleteResponse) error) error
}

// Options are the dependencies of the handler.
type Options struct {
	Backend    Backend
	Keys       *apikey.Ring // nil: no key is needed
	TrustOwner bool         // the user of this process and root need no key over loopback
	Log        *slog.Logger
	Now        func() time.Time
}

type handler struct {
	Options
}

// Handler returns the API.
func Handler(o Options) http.Handler {
	h := &handler{Options: o}
	mux := http.NewServeMux()
	route := func(method, path string, serve func(w http.ResponseWriter, r *http.Request) error) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			h.guard(w, r, method, serve)
		})
	}
	route(http.MethodGet, "/v1/models", h.models)
	route(http.MethodGet, "/v1/models/{model...}", h.model)
	route(http.MethodPost, "/v1/chat/completions", h.chat)
	route(http.MethodPost, "/v1/completions", h.completions)
	mux.HandleFunc("/health", func(w http.ResponseWriter, r *http.Request) {
		if h.refused(w, r, http.MethodGet) {
			return
		}
		_ = writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		h.fail(w, r, &apiError{
			Status: http.StatusNotFound, Type: typeInvalid, Code: "unknown_url",
			Message: "unknown request URL: " + r.Method + " " + r.URL.Path + "; the URLs are /v1/models, /v1/chat/completions, /v1/completions, and /health",
		})
	})
	return traced(mux)
}

// guard checks the method and the key, and responds with the error of serve.
func (h *handler) guard(w http.ResponseWriter, r *http.Request, method string, serve func(http.ResponseWriter, *http.Request) error) {
	if h.refused(w, r, method) {
		return
	}
	if err := h.admit(r); err != nil {
		w.Header().Set("WWW-Authenticate", "Bearer")
		h.fail(w, r, err)
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxBody)
	if err := serve(w, r); err != nil {
		h.fail(w, r, err)
	}
}

// refused responds to a request with another method, and reports whether it did. HEAD counts as
// GET.
func (h *handler) refused(w http.ResponseWriter, r *http.Request, method string) bool {
	if r.Method == method || r.Method == http.MethodHead && method == http.MethodGet {
		return false
	}
	allowed := method
	if method == http.MethodGet {
		allowed = "GET, HEAD"
	}
	w.Header().Set("Allow", allowed)
	h.fail(w, r, &apiError{
		Status: http.StatusMethodNotAllowed, Type: typeInvalid, Code: "method_not_supported",
		Message: "method " + r.Method + " is not allowed on " + r.URL.Path + "; use " + method,
	})
	return true
}

// admit checks the key: GET needs the scope read, POST the scope submit. A valid key's scope counts
// for the owner too.
func (h *handler) admit(r *http.Request) error {
	if h.Keys == nil {
		return nil
	}
	sent, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	key, ok, err := h.Keys.Find(sent)
	if err != nil {
		return err
	}
	if !ok && h.TrustOwner && fromOwner(r.Context()) {
		return nil
	}
	if !ok {
		return h.noKey(r.Context())
	}
	needed := apikey.Submit
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		needed = apikey.Read
	}
	if !key.Scope.Allows(needed) {
		return &apiError{
			Status: http.StatusForbidden, Type: typeInvalid, Code: "insufficient_permissions",
			Message: "the API key " + key.Name + " has the scope " + string(key.Scope) + ", but this request needs " + string(needed) +
				"; use a key with that scope (`rollout keys create NAME --scope " + string(needed) + "`)",
		}
	}
	return nil
}

type modelJSON struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
	// Beyond OpenAI's fields.
	RunID          string `json:"run_id"`
	WeightsVersion uint64 `json:"weights_version"`
	WeightsDigest  string `json:"weights_digest,omitempty"`
	MaxModelLen    uint32 `json:"max_model_len,omitempty"`
}

func modelOf(m *gatewayv1.Model) modelJSON {
	return modelJSON{
		ID: m.GetName(), Object: "model", Created: m.GetCreateTime().GetSeconds(), OwnedBy: "rollout", RunID: m.GetRunId(),
		WeightsVersion: m.GetWeightsVersion(), WeightsDigest: m.GetWeightsDigest(), MaxModelLen: m.GetMaxModelLen(),
	}
}

func (h *handler) models(w http.ResponseWriter, r *http.Request) error {
	list := struct {
		Object string      `json:"object"`
		Data   []modelJSON `json:"data"`
	}{Object: "list", Data: []modelJSON{}}
	for _, m := range h.Backend.Models(r.Context()) {
		list.Data = append(list.Data, modelOf(m))
	}
	return writeJSON(w, http.StatusOK, list)
}

func (h *handler) model(w http.ResponseWriter, r *http.Request) error {
	for _, m := range h.Backend.Models(r.Context()) {
		if name := r.PathValue("model"); m.GetName() == name || m.GetRunId() == name {
			return writeJSON(w, http.StatusOK, modelOf(m))
		}
	}
	return unknownModel(r.PathValue("model"))
}
