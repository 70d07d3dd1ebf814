package openai

import (
	"encoding/json"
	"net/http"
	"sync"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

// maxStored is the number of responses that the gateway can continue. The oldest are dropped.
const maxStored = 4096

// storedResponse is a response that a later one may continue.
type storedResponse struct {
	session  string
	messages []*inferencev1.ChatMessage // up to its output, without instructions
	items    []json.RawMessage          // of its input
	body     any
}

// responseStore keeps the newest responses in memory. Their tokens are in the ledger of the
// session.
type responseStore struct {
	mu    sync.Mutex
	byID  map[string]*storedResponse
	order []string
}

func newResponseStore() *responseStore { return &responseStore{byID: map[string]*storedResponse{}} }

func (s *responseStore) put(id string, r *storedResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byID[id] = r
	s.order = append(s.order, id)
	if len(s.order) > maxStored {
		delete(s.byID, s.order[0])
		s.order = s.order[1:]
	}
}

func (s *responseStore) get(id string) *storedResponse {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byID[id]
}

func (s *responseStore) remove(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.byID[id]
	delete(s.byID, id)
	return ok
}

func unknownResponse(param, id string) *edge.Error {
	return &edge.Error{
		Status: http.StatusNotFound, Param: param, Code: "response_not_found", Message: "no stored response has the id " + id,
		Fix: "send the whole history as `input`: responses with `store: false` are not kept, and the others are until the gateway restarts or has newer ones",
	}
}

func (h *handler) response(w http.ResponseWriter, r *http.Request) error {
	found := h.stored.get(r.PathValue("id"))
	if found == nil {
		return unknownResponse("", r.PathValue("id"))
	}
	return edge.WriteJSON(w, http.StatusOK, found.body)
}

func (h *handler) deleteResponse(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	if !h.stored.remove(id) {
		return unknownResponse("", id)
	}
	return edge.WriteJSON(w, http.StatusOK, map[string]any{"id": id, "object": "response", "deleted": true})
}

func (h *handler) responseInput(w http.ResponseWriter, r *http.Request) error {
	found := h.stored.get(r.PathValue("id"))
	if found == nil {
		return unknownResponse("", r.PathValue("id"))
	}
	return edge.WriteJSON(w, http.StatusOK, map[string]any{"object": "list", "data": found.items, "has_more": false})
}
