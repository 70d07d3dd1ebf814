package edge

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// Error is a failed request. A dialect writes it in its own shape.
type Error struct {
	Status   int
	Retry    int               // seconds; 0: no Retry-After
	Code     string            // snake_case
	Reason   string            // of the domain error; "": Code in upper case
	Param    string            // field of the request
	Message  string            // what is wrong
	Fix      string            // what the caller can do
	Metadata map[string]string // of the domain error
	cause    error             // for the log; nil if the message is complete
}

// Error returns the message with the fix.
func (e *Error) Error() string {
	if e.Fix == "" || strings.Contains(e.Message, e.Fix) {
		return e.Message
	}
	return e.Message + "; " + e.Fix
}

func (e *Error) Unwrap() error { return e.cause }

// Facts is our part of an error object in every dialect.
type Facts struct {
	Reason   string            `json:"reason"`
	Fix      string            `json:"fix,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// Facts returns our part of the error object.
func (e *Error) Facts() Facts {
	facts := Facts{Reason: e.Reason, Fix: e.Fix, Metadata: e.Metadata}
	if facts.Reason == "" {
		facts.Reason = strings.ToUpper(e.Code)
	}
	return facts
}

// PlainBody is an error in the shape of OpenAI, which vLLM and SGLang share.
func PlainBody(e *Error) any {
	null := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	kind := "invalid_request_error"
	if e.Status >= http.StatusInternalServerError {
		kind = "server_error"
	}
	type object struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
		Facts
	}
	return map[string]object{"error": {Message: e.Error(), Type: kind, Param: null(e.Param), Code: null(e.Code), Facts: e.Facts()}}
}

// Invalid is the error for an invalid value of a parameter.
func Invalid(param, format string, args ...any) *Error {
	return &Error{Status: http.StatusBadRequest, Param: param, Code: "invalid_value", Message: fmt.Sprintf(format, args...)}
}

// Missing is the error for a parameter that is required.
func Missing(param, format string, args ...any) *Error {
	return &Error{Status: http.StatusBadRequest, Param: param, Code: "missing_required_parameter", Message: fmt.Sprintf(format, args...)}
}

// Unsupported is the error for a parameter that would change the completion and is not supported.
func Unsupported(param, why string) *Error {
	return &Error{Status: http.StatusBadRequest, Param: param, Code: "unsupported_parameter", Message: "`" + param + "` is not supported: " + why}
}

// UnknownModel is the error for a model that is not served.
func UnknownModel(name string) *Error {
	return &Error{
		Status: http.StatusNotFound, Param: "model", Code: "model_not_found",
		Message: fmt.Sprintf("the model %q does not exist", name), Fix: "GET /v1/models lists the models",
	}
}

// internal is the error for a failure that the caller can't fix.
func internal(cause error) *Error {
	return &Error{Status: http.StatusInternalServerError, Code: "internal_error", Message: "internal error; the log of the server has the details", cause: cause}
}

// Rename replaces the name of a parameter in err, for a dialect that has another name for it.
func Rename(err error, names map[string]string) error {
	var known *Error
	if !errors.As(err, &known) || names[known.Param] == "" {
		return err
	}
	renamed := *known
	renamed.Param = names[known.Param]
	renamed.Message = strings.ReplaceAll(known.Message, "`"+known.Param+"`", "`"+renamed.Param+"`")
	return &renamed
}

// ErrorOf converts any error. model is the requested model, prompt the parameter that has the
// prompt.
func ErrorOf(err error, model, prompt string) *Error {
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	domain, ok := rpcerr.From(err)
	if !ok {
		return internal(err)
	}
	if domain.Reason() == "MODEL_NOT_FOUND" {
		return UnknownModel(model)
	}
	metadata := domain.Metadata()
	e := &Error{Status: http.StatusBadRequest, Code: "invalid_value", Reason: domain.Reason(), Message: domain.Error(), Fix: metadata["fix"]}
	delete(metadata, "fix")
	if len(metadata) > 0 {
		e.Metadata = metadata
	}
	switch domain.Reason() {
	case "MODEL_NOT_NAMED":
		e.Param = "model"
		return e
	case "CONTEXT_OVERFLOW":
		e.Param, e.Code = prompt, "context_length_exceeded"
		return e
	case "RATE_LIMITED":
		e.Status, e.Code = http.StatusTooManyRequests, "rate_limit_exceeded"
		e.Retry = int(math.Ceil(max(1, domain.RetryDelay().Seconds())))
		return e
	case "INVALID_PROMPT", "PROMPT_INVALID":
		e.Param = prompt
		return e
	}
	switch domain.Code() {
	case codes.InvalidArgument, codes.OutOfRange:
		if domain.Reason() == "UNSUPPORTED_BY_ENGINE" {
			e.Code = "unsupported_parameter"
		}
		if wrong := domain.Violations(); len(wrong) > 0 {
			e.Param = paramOf(wrong[0].Path, prompt)
		}
	case codes.Unimplemented:
		e.Code = "unsupported_parameter"
	case codes.Unauthenticated:
		e.Status, e.Code = http.StatusUnauthorized, "invalid_api_key"
	case codes.NotFound:
		e.Status, e.Code = http.StatusNotFound, "not_found"
	case codes.FailedPrecondition, codes.Aborted, codes.AlreadyExists:
		e.Status, e.Code = http.StatusConflict, "conflict"
	case codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded:
		e.Status, e.Code = http.StatusServiceUnavailable, "service_unavailable"
		e.Retry = int(math.Ceil(max(1, domain.RetryDelay().Seconds())))
	default:
		return internal(err)
	}
	return e
}

// contractual is the beginning of a field of the contract that a field of a dialect does not have.
var contractual = regexp.MustCompile(`^(params\.|prompts\[\d+\]\.chat\.)`)

// paramOf returns the parameter of a field of the contract. prompt is the parameter that has the
// prompt.
func paramOf(field, prompt string) string {
	if short := contractual.ReplaceAllString(field, ""); short != field || !strings.HasPrefix(field, "prompts") {
		return short
	}
	return prompt
}

// fail responds with an error. Nothing was written before.
func (e *Edge) fail(w http.ResponseWriter, r *http.Request, body func(*Error) any, err error) {
	failure := ErrorOf(err, "", "")
	if r.Context().Err() != nil && failure.Status != http.StatusRequestTimeout {
		return // the client is gone; of one that is too slow, the server cancels the context itself
	}
	e.logged(w, r, failure, err)
	if failure.Retry > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(failure.Retry))
	}
	_ = WriteJSON(w, failure.Status, body(failure))
}

// logged logs a failure that the caller can't fix.
func (e *Edge) logged(w http.ResponseWriter, r *http.Request, failure *Error, err error) {
	if failure.Status < http.StatusInternalServerError {
		return
	}
	if failure.cause != nil {
		err = failure.cause
	}
	e.Log.WarnContext(r.Context(), "a gateway request failed", "request", w.Header().Get("x-request-id"), "path", r.URL.Path, "status", failure.Status, "error", err)
}

// WriteJSON writes a response.
func WriteJSON(w http.ResponseWriter, status int, body any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(raw, '\n'))
	return nil
}
