package edge

import (
	"net/http"
	"strconv"

	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
)

// Target is which policy, session, and weights a request is for.
type Target struct {
	Model             *string  `json:"model"`
	SessionID         string   `json:"session_id"`
	WeightsVersion    *Integer `json:"weights_version"`
	MinWeightsVersion *Integer `json:"min_weights_version"`
	MinWeightVersion  *Integer `json:"min_weight_version"` // another spelling
}

// Request makes the request for the gateway, without prompts and sampling.
func (t *Target) Request(r *http.Request) (*gatewayv1.CompleteRequest, error) {
	session, err := Session(r, t.SessionID)
	if err != nil {
		return nil, err
	}
	req := &gatewayv1.CompleteRequest{N: 1, SessionId: session}
	if t.Model != nil {
		req.Model = *t.Model
	}
	if req.WeightsVersion, err = version(r, "weights_version", "x-rollout-weights-version", t.WeightsVersion); err != nil {
		return nil, err
	}
	if t.MinWeightsVersion == nil {
		t.MinWeightsVersion = t.MinWeightVersion
	}
	req.MinWeightsVersion, err = version(r, "min_weights_version", "x-rollout-min-weights-version", t.MinWeightsVersion)
	return req, err
}

// Named is Request of a dialect that requires the name of the model.
func (t *Target) Named(r *http.Request) (*gatewayv1.CompleteRequest, error) {
	if t.Model == nil || *t.Model == "" {
		e := Missing("model", "`model` is missing")
		e.Fix = "GET /v1/models lists the models"
		return nil, e
	}
	return t.Request(r)
}

// version returns a version from the body or a header.
func version(r *http.Request, param, header string, sent *Integer) (*uint64, error) {
	if sent != nil {
		if err := AtLeast(param, sent, 0); err != nil {
			return nil, err
		}
		return Ptr(uint64(*sent)), nil
	}
	text := r.Header.Get(header)
	if text == "" {
		return nil, nil
	}
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		return nil, Invalid(header, "the header %s must be a weights version, got %q", header, text)
	}
	return &n, nil
}

// Session returns the session of a request: of its URL, headers, or body. They must agree. Only
// X-Session-ID is ignored if the URL names a session: clients such as verifiers set it to an id of
// theirs, and an agent has set the URL to the session of its episode.
func Session(r *http.Request, body string) (string, error) {
	found, source := "", ""
	header := r.Header.Get("X-Session-ID")
	if r.PathValue("session") != "" {
		header = ""
	}
	for _, at := range []struct{ name, id string }{
		{"URL", r.PathValue("session")},
		{"header X-Session-ID", header},
		{"header x-rollout-session", r.Header.Get("x-rollout-session")},
		{"field session_id", body},
	} {
		switch {
		case at.id == "" || at.id == found:
			continue
		case found != "":
			return "", Invalid("session_id", "the %s names the session %q, and the %s %q; send one", source, found, at.name, at.id)
		}
		for _, c := range []byte(at.id) {
			if c <= ' ' || c > '~' {
				return "", Invalid("session_id", "the session id in the %s must have printable ASCII characters without spaces, got %q", at.name, at.id)
			}
		}
		if len(at.id) > 64 {
			return "", Invalid("session_id", "the session id in the %s must have at most 64 characters, got %d", at.name, len(at.id))
		}
		found, source = at.id, at.name
	}
	return found, nil
}
