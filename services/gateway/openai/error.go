package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Error types of OpenAI.
const (
	typeInvalid = "invalid_request_error"
	typeServer  = "server_error"
)

// apiError is an error in the format of OpenAI.
type apiError struct {
	Status  int    `json:"-"`
	Retry   int    `json:"-"` // seconds; 0: no Retry-After
	Message string `json:"message"`
	Type    string `json:"type"`
	Param   string `json:"param"`
	Code    string `json:"code"`
	cause   error  // for the log; nil if the message is complete
}

func (e *apiError) Error() string { return e.Message }

func (e *apiError) Unwrap() error { return e.cause }

// MarshalJSON writes an empty param or code as null, as OpenAI does.
func (e *apiError) MarshalJSON() ([]byte, error) {
	null := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	return json.Marshal(struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	}{e.Message, e.Type, null(e.Param), null(e.Code)})
}

// invalid is the error for an invalid value of a parameter.
func invalid(param, format string, args ...any) error {
	return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: param, Code: "invalid_value", Message: fmt.Sprintf(format, args...)}
}

// unsupported is the error for a parameter that would change the completion and is not supported.
func unsupported(param, why string) error {
	return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: param, Code: "unsupported_parameter", Message: "`" + param + "` is not supported: " + why}
}

func unknownModel(name string) *apiError {
	return &apiError{
		Status: http.StatusNotFound, Type: typeInvalid, Param: "model", Code: "model_not_found",
		Message: fmt.Sprintf("the model %q does not exist; GET /v1/models lists the models", name),
	}
}

// internal is the error for a failure that the caller can't fix.
func internal(cause error) *apiError {
	return &apiError{
		Status: http.StatusInternalServerError, Type: typeServer, Code: "internal_error", Message: "internal error; the log of the server has the details", cause: cause,
	}
}

// errorOf converts any error. model is the requested model, prompt the parameter that has the
// prompt.
func errorOf(err error, model, prompt string) *apiError {
	var known *apiError
	if errors.As(err, &known) {
		return known
	}
	domain, ok := rpcerr.From(err)
	if !ok {
		return internal(err)
	}
	switch {
	case domain.Reason() == "MODEL_NOT_FOUND":
		return unknownModel(model)
	case domain.Reason() == "MODEL_NOT_NAMED":
		return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: "model", Code: "invalid_value", Message: domain.Error()}
	case domain.Reason() == "CONTEXT_OVERFLOW":
		return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: prompt, Code: "context_length_exceeded", Message: domain.Error()}
	case domain.Reason() == "INVALID_PROMPT", domain.Reason() == "PROMPT_INVALID":
		return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Param: prompt, Code: "invalid_value", Message: domain.Error()}
	case domain.Code() == codes.InvalidArgument:
		return &apiError{Status: http.StatusBadRequest, Type: typeInvalid, Code: "invalid_value", Message: domain.Error()}
	case domain.Code() == codes.Unavailable, domain.Code() == codes.ResourceExhausted:
		retry := int(math.Ceil(max(1, domain.RetryDelay().Seconds())))
		return &apiError{Status: http.StatusServiceUnavailable, Retry: retry, Type: typeServer, Code: "service_unavailable", Message: domain.Error()}
	}
	return internal(err)
}

// fail responds with an error. Nothing was written before.
func (h *handler) fail(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		return // the client is gone
	}
	e := errorOf(err, "", "")
	if e.Status >= http.StatusInternalServerError {
		if e.cause != nil {
			err = e.cause
		}
		h.Log.WarnContext(r.Context(), "a gateway request failed", "path", r.URL.Path, "status", e.Status, "error", err)
	}
	if e.Retry > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.Retry))
	}
	_ = writeJSON(w, e.Status, map[string]*apiError{"error": e})
}

func writeJSON(w http.ResponseWriter, status int, body any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(raw, '\n'))
	return nil
}
