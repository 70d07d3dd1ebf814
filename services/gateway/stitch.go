package gateway

import (
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

// finishAbort is the finish reason of a completion that its worker has ended early, because it
// shuts down.
const finishAbort = "abort"

// recorder collects the pieces of a request. If a worker fails, the next one continues the
// completions, and the recorder makes their pieces continue those that the caller has.
type recorder struct {
	now    func() time.Time
	call   *inferencev1.GenerateRequest
	calls  int             // of workers
	open   int             // completions that have not ended
	tokens int             // of all completions
	list   [][]*completion // by prompt and sample
}

// completion collects the pieces of one completion.
type completion struct {
	request        string
	prompt, sample uint32
	text           strings.Builder
	ids            []uint32
	logprobs, raw  []float32
	spans          []*trajectoryv1.VersionSpan // of the tokens so far
	start          uint32                      // number of tokens that earlier workers sampled
	finish         string                      // empty until it has ended
	ended          time.Time
	promptIDs      []uint32
	last           *inferencev1.GenerateResponse
	segments       []*sessionv1.Segment // as the worker made them; none if it did not
}

func newRecorder(call *inferencev1.GenerateRequest, now func() time.Time) *recorder {
	r := &recorder{now: now, call: call, open: len(call.GetPrompts()) * int(call.GetN())}
	for p := range call.GetPrompts() {
		row := make([]*completion, call.GetN())
		for n := range row {
			row[n] = &completion{request: call.GetRequestId(), prompt: uint32(p), sample: uint32(n)}
		}
		r.list = append(r.list, row)
	}
	return r
}

// request returns the call for the next worker: the completions continue after the tokens so far.
// It has the same id, because workers derive the ids of tool calls from it.
func (r *recorder) request(session *inferencev1.SessionState) *inferencev1.GenerateRequest {
	r.calls++
	r.call.Session = session
	if r.calls == 1 {
		return r.call
	}
	call := proto.CloneOf(r.call)
	for _, row := range r.list {
		for _, c := range row {
			if c.start = uint32(len(c.ids)); c.start > 0 || c.finish != "" {
				call.Continuations = append(call.Continuations, &inferencev1.Continuation{
					Prompt: c.prompt, Sample: c.sample, TokenIds: slices.Clone(c.ids), Ended: c.finish != "",
				})
			}
		}
	}
	return call
}

// begun reports whether the caller has a part of a completion.
func (r *recorder) begun() bool { return r.tokens > 0 || r.open < len(r.list)*int(r.call.GetN()) }

// complete reports whether all completions have ended.
func (r *recorder) complete() bool { return r.open == 0 }

// promptTokens is the number of tokens of the prompts whose completions have ended.
func (r *recorder) promptTokens() (n int) {
	for _, row := range r.list {
		n += int(row[0].last.GetPromptTokens())
	}
	return n
}

// longest is the number of tokens of the longest completion.
func (r *recorder) longest() (n int) {
	for _, row := range r.list {
		for _, c := range row {
			n = max(n, len(c.ids))
		}
	}
	return n
}

// add records a piece, and changes it to continue the earlier ones. keep is whether the caller gets
// it, done the completion that it ends; nil if it ends none.
func (r *recorder) add(piece *inferencev1.GenerateResponse) (keep bool, done *completion, err error) {
	if int(piece.GetPrompt()) >= len(r.list) || int(piece.GetSample()) >= len(r.list[piece.GetPrompt()]) {
		return false, nil, rpcerr.New(codes.Internal, "BAD_PIECE", "the worker sent a piece of a completion that was not requested")
	}
	c := r.list[piece.GetPrompt()][piece.GetSample()]
	aborted := piece.GetFinishReason() == finishAbort
	if c.finish != "" || aborted && !r.call.GetStream() { // the next worker samples it from the beginning
		return false, nil, nil
	}
	if aborted {
		piece = partial(piece)
		keep = len(piece.GetTokenIds()) > 0 || piece.GetText() != "" || piece.GetDelta() != nil
	} else {
		keep = true
	}
	r.tokens += len(piece.GetTokenIds())
	if err := c.add(piece, r.now()); err != nil || c.finish == "" {
		return keep, nil, err
	}
	r.open--
	return true, c, nil
}

// partial makes the last piece of a worker one of a completion that continues.
func partial(piece *inferencev1.GenerateResponse) *inferencev1.GenerateResponse {
	piece.FinishReason, piece.VersionSpans, piece.PromptTokens, piece.PromptTokenIds, piece.CachedTokens = "", nil, 0, nil, 0
	piece.PromptLogprobs, piece.PromptTexts, piece.PromptTopLogprobs, piece.Segments = nil, nil, nil, nil
	return piece
}

// add adds a piece, and makes the last one describe the whole completion.
func (c *completion) add(piece *inferencev1.GenerateResponse, now time.Time) error {
	c.text.WriteString(piece.GetText())
	c.ids = append(c.ids, piece.GetTokenIds()...)
	c.logprobs = append(c.logprobs, piece.GetLogprobs()...)
	c.raw = append(c.raw, piece.GetRawLogprobs()...)
	c.span(piece)
	if piece.GetFinishReason() == "" {
		return nil
	}
	if c.start > 0 {
		piece.VersionSpans = c.stitched(piece.GetVersionSpans())
	}
	c.finish, c.ended, c.last, c.promptIDs, c.segments = piece.GetFinishReason(), now, piece, piece.GetPromptTokenIds(), piece.GetSegments()
	if n := len(c.segments); n > 0 && c.segments[n-1].GetRole() != sessionv1.Role_ROLE_ASSISTANT {
		return rpcerr.New(codes.Internal, "BAD_PIECE", "the worker sent segments that do not end with the completion")
	}
	return nil
}

// span records the weights version of a piece.
func (c *completion) span(piece *inferencev1.GenerateResponse) {
	end := uint32(len(c.ids))
	start := end - uint32(len(piece.GetTokenIds()))
	if start == end {
		return
	}
	version := piece.GetWeightsVersion()
	if piece.WeightsVersion == nil && len(c.spans) > 0 {
		version = c.spans[len(c.spans)-1].GetVersion()
	}
	if n := len(c.spans); n > 0 && c.spans[n-1].GetVersion() == version {
		c.spans[n-1].End = end
		return
	}
	c.spans = append(c.spans, &trajectoryv1.VersionSpan{Version: version, Start: start, End: end})
}

// stitched returns the spans of the whole completion. last: those of the last worker, whose
// positions begin at the tokens that it sampled.
func (c *completion) stitched(last []*trajectoryv1.VersionSpan) []*trajectoryv1.VersionSpan {
	var all []*trajectoryv1.VersionSpan
	for _, s := range c.spans {
		if s.GetStart() < c.start {
			all = append(all, &trajectoryv1.VersionSpan{Version: s.GetVersion(), Start: s.GetStart(), End: min(s.GetEnd(), c.start)})
		}
	}
	for _, s := range last {
		all = joined(all, &trajectoryv1.VersionSpan{Version: s.GetVersion(), Start: s.GetStart() + c.start, End: s.GetEnd() + c.start, Digest: s.GetDigest()})
	}
	return all
}

// joined appends a span to others that end where it begins, and may change the last of them.
func joined(spans []*trajectoryv1.VersionSpan, next *trajectoryv1.VersionSpan) []*trajectoryv1.VersionSpan {
	if n := len(spans); n > 0 && spans[n-1].GetVersion() == next.GetVersion() && spans[n-1].GetDigest() == next.GetDigest() {
		spans[n-1].End = next.GetEnd()
		return spans
	}
	return append(spans, next)
}
