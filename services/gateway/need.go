package gateway

import (
	"hash/fnv"
	"io"
	"strconv"

	gatewayv1 "github.com/rollout-rl/rollout/proto/gen/rollout/gateway/v1"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

const (
	bytesPerToken  = 4   // of text, about
	usualMaxTokens = 256 // of a request without a limit
	// prefixBytes of a prompt select its worker. A shorter prompt gains little from a cache, and
	// goes to any.
	prefixBytes    = 1024
	minPrefixBytes = 128
)

// needOf returns what a request needs from a worker.
func needOf(req *gatewayv1.CompleteRequest) need {
	completions := len(req.GetPrompts()) * int(max(1, req.GetN()))
	limit := usualMaxTokens
	if p := req.GetParams(); p != nil && p.MaxTokens != nil {
		limit = int(p.GetMaxTokens())
	}
	n := need{completions: completions, tokens: completions * limit, version: req.WeightsVersion, versionFloor: req.MinWeightsVersion}
	for _, p := range req.GetPrompts() {
		n.tokens += promptTokens(p)
	}
	switch {
	case req.GetSessionId() != "":
		n.affinity = "session " + req.GetSessionId()
	case len(req.GetPrompts()) > 0:
		n.affinity = prefixOf(req.GetPrompts()[0])
	}
	return n
}

// promptTokens is about the number of tokens of a prompt.
func promptTokens(p *inferencev1.Prompt) int {
	if ids := p.GetTokens().GetIds(); len(ids) > 0 {
		return len(ids)
	}
	size := len(p.GetText())
	for _, m := range p.GetChat().GetMessages() {
		size += len(m.GetContent()) + len(m.GetReasoning())
	}
	return size/bytesPerToken + 1
}

// prefixOf is a hash of the first bytes of a prompt; empty for a short prompt.
func prefixOf(p *inferencev1.Prompt) string {
	h, left := fnv.New64a(), prefixBytes
	put := func(text string) {
		text = text[:min(left, len(text))]
		left -= len(text)
		_, _ = io.WriteString(h, text)
	}
	put(p.GetText())
	for _, tool := range p.GetChat().GetTools() {
		put(tool.GetName())
		put(tool.GetParameters())
	}
	for _, m := range p.GetChat().GetMessages() {
		put(m.GetRole())
		put(m.GetContent())
	}
	for _, id := range p.GetTokens().GetIds() {
		if left == 0 {
			break
		}
		put(strconv.FormatUint(uint64(id), 36) + " ")
	}
	if prefixBytes-left < minPrefixBytes {
		return ""
	}
	return "prefix " + strconv.FormatUint(h.Sum64(), 36)
}
