package openai

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

// maxStored is the number of responses that a gateway has in memory. The oldest are dropped.
const maxStored = 4096

// responseID is the id of a response: the request and, if the response may be continued, the
// session, by which any gateway finds its messages in the ledger. The instructions of a response
// are not part of a later one, so the id says whether there are any.
type responseID struct {
	request      string
	session      string // "": not stored
	instructions bool
}

func (r responseID) String() string {
	switch {
	case r.session == "":
		return "resp_" + r.request
	case r.instructions:
		return "resp_" + r.request + "i_" + r.session
	}
	return "resp_" + r.request + "_" + r.session
}

func parseResponseID(text string) responseID {
	request, session, _ := strings.Cut(strings.TrimPrefix(text, "resp_"), "_")
	trimmed, instructions := strings.CutSuffix(request, "i")
	if !instructions || len(trimmed) < requestLength {
		return responseID{request: request, session: session}
	}
	return responseID{request: trimmed, session: session, instructions: true}
}

// requestLength is the characters of the id of a request.
const requestLength = 26

// history returns the messages up to the output of a stored response, and its session.
func (h *handler) history(ctx context.Context, id string) ([]*inferencev1.ChatMessage, string, error) {
	if found, known := h.stored.get(id); found != nil {
		return found.messages, found.session, nil
	} else if known {
		return nil, "", unknownResponse("previous_response_id", id) // deleted
	}
	parsed := parseResponseID(id)
	if parsed.session == "" {
		return nil, "", unknownResponse("previous_response_id", id)
	}
	texts, err := h.Backend.Messages(ctx, parsed.session, "req-"+parsed.request)
	if rpcerr.Code(err) == codes.NotFound {
		return nil, "", unknownResponse("previous_response_id", id)
	}
	if err != nil {
		return nil, "", err
	}
	var out []*inferencev1.ChatMessage
	for i, text := range texts {
		var m message
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			return nil, "", fmt.Errorf("message %d of session %s: %w", i, parsed.session, err)
		}
		converted, err := m.proto(fmt.Sprintf("messages[%d]", i))
		if err != nil {
			return nil, "", fmt.Errorf("message %d of session %s: %w", i, parsed.session, err)
		}
		if i == 0 && parsed.instructions && converted.GetRole() == "system" {
			continue
		}
		out = append(out, converted)
	}
	return out, parsed.session, nil
}

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

// get returns nil for a response that is not in memory. known: whether it was.
func (s *responseStore) get(id string) (found *storedResponse, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found, known = s.byID[id]
	return found, known
}

func (s *responseStore) remove(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	found := s.byID[id]
	if found != nil {
		s.byID[id] = nil
	}
	return found != nil
}

func unknownResponse(param, id string) *edge.Error {
	return &edge.Error{
		Status: http.StatusNotFound, Param: param, Code: "response_not_found", Message: "no stored response has the id " + id,
		Fix: "send the whole history as `input`, and `store: true` for responses to continue",
	}
}

func (h *handler) response(w http.ResponseWriter, r *http.Request) error {
	found, _ := h.stored.get(r.PathValue("id"))
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
	found, _ := h.stored.get(r.PathValue("id"))
	if found == nil {
		return unknownResponse("", r.PathValue("id"))
	}
	return edge.WriteJSON(w, http.StatusOK, map[string]any{"object": "list", "data": found.items, "has_more": false})
}
