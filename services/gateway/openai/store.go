package openai

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	"github.com/rollout-rl/rollout/services/gateway/edge"
)

// responseID returns the id of the response to a request.
func responseID(request string) string { return "resp_" + request }

// validID matches the ids of responses.
var validID = regexp.MustCompile(`^resp_[0-9a-z]{26}$`)

// read returns a stored response. param is the parameter that names it; "": the URL does.
func (h *handler) read(ctx context.Context, param, id string) (*edge.StoredResponse, error) {
	if !validID.MatchString(id) {
		return nil, unknownResponse(param, id)
	}
	found, err := h.Responses.Response(ctx, id)
	if rpcerr.Code(err) == codes.NotFound {
		return nil, unknownResponse(param, id)
	}
	return found, err
}

// history returns the messages up to the output of a stored response, and its session. They are in
// the ledger of the session. The instructions of a response are not part of a later one.
func (h *handler) history(ctx context.Context, id string) ([]*inferencev1.ChatMessage, string, error) {
	stored, err := h.read(ctx, "previous_response_id", id)
	if err != nil {
		return nil, "", err
	}
	var body struct{ Instructions string }
	if err := json.Unmarshal(stored.Body, &body); err != nil {
		return nil, "", fmt.Errorf("response %s: %w", id, err)
	}
	texts, err := h.Backend.Messages(ctx, stored.Session, "req-"+strings.TrimPrefix(id, "resp_"))
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
			return nil, "", fmt.Errorf("message %d of session %s: %w", i, stored.Session, err)
		}
		converted, err := m.proto(fmt.Sprintf("messages[%d]", i))
		if err != nil {
			return nil, "", fmt.Errorf("message %d of session %s: %w", i, stored.Session, err)
		}
		if i == 0 && body.Instructions != "" && converted.GetRole() == "system" {
			continue
		}
		out = append(out, converted)
	}
	return out, stored.Session, nil
}

func unknownResponse(param, id string) *edge.Error {
	return &edge.Error{
		Status: http.StatusNotFound, Param: param, Code: "response_not_found", Message: "no stored response has the id " + id,
		Fix: "send the whole history as `input`, and `store: true` for responses to continue",
	}
}

func (h *handler) response(w http.ResponseWriter, r *http.Request) error {
	found, err := h.read(r.Context(), "", r.PathValue("id"))
	if err != nil {
		return err
	}
	return edge.WriteJSON(w, http.StatusOK, json.RawMessage(found.Body))
}

func (h *handler) deleteResponse(w http.ResponseWriter, r *http.Request) error {
	id := r.PathValue("id")
	if !validID.MatchString(id) {
		return unknownResponse("", id)
	}
	err := h.Responses.DeleteResponse(r.Context(), id)
	if rpcerr.Code(err) == codes.NotFound {
		return unknownResponse("", id)
	}
	if err != nil {
		return err
	}
	return edge.WriteJSON(w, http.StatusOK, map[string]any{"id": id, "object": "response", "deleted": true})
}

func (h *handler) responseInput(w http.ResponseWriter, r *http.Request) error {
	found, err := h.read(r.Context(), "", r.PathValue("id"))
	if err != nil {
		return err
	}
	return edge.WriteJSON(w, http.StatusOK, map[string]any{"object": "list", "data": json.RawMessage(found.Input), "has_more": false})
}
