package main

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/cmd/internal/scripted"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
)

const (
	promptTokens = 96   // that a turn adds before the completion
	logprob      = -0.5 // of each token
)

// Generate samples a chat of a session at the pace that its last message asks for.
func (a *answers) Generate(req *inferencev1.GenerateRequest, stream grpc.ServerStreamingServer[inferencev1.GenerateResponse]) error {
	messages := req.GetPrompts()[0].GetChat().GetMessages()
	pace := scripted.Pace(messages[len(messages)-1].GetContent())
	version, _ := a.weights.now()
	tokens := int(req.GetParams().GetMaxTokens())
	return scripted.Sample(stream.Context(), pace, tokens, a.aborts, func(i int, text string) error {
		piece := &inferencev1.GenerateResponse{
			Text: text, TokenIds: []uint32{uint32(1000 + i)}, Logprobs: []float32{logprob}, RawLogprobs: []float32{logprob}, WeightsVersion: &version,
			Delta: &inferencev1.MessageDelta{Content: text},
		}
		if i == tokens-1 {
			turn := turnOf(req, tokens, version)
			piece.FinishReason, piece.PromptTokens, piece.Segments = "length", promptTokens, turn
			piece.VersionSpans = turn[1].GetVersionSpans()
		}
		return stream.Send(piece)
	})
}

// turnOf returns the segments that a turn appends to its session: the prompt and the completion.
func turnOf(req *inferencev1.GenerateRequest, tokens int, version uint64) []*sessionv1.Segment {
	session := req.GetSession()
	at := int(session.GetKnown()) + len(session.GetSegments())
	prompt := &sessionv1.Segment{
		SegmentId: fmt.Sprint("s", at), SessionId: session.GetSessionId(), Role: sessionv1.Role_ROLE_USER, Tokens: promptTokens,
		Inline: &sessionv1.SegmentTokens{TokenIds: numbered(promptTokens), LossMask: make([]byte, promptTokens)},
	}
	if at > 0 {
		prompt.ParentSegmentId = fmt.Sprint("s", at-1)
	}
	mask := make([]byte, tokens)
	var logprobs []byte
	for i := range mask {
		mask[i] = 1
		logprobs = binary.LittleEndian.AppendUint32(logprobs, math.Float32bits(logprob))
	}
	said := &sessionv1.Segment{
		SegmentId: fmt.Sprint("s", at+1), SessionId: session.GetSessionId(), ParentSegmentId: prompt.GetSegmentId(), Role: sessionv1.Role_ROLE_ASSISTANT,
		Tokens: uint32(tokens), VersionSpans: []*trajectoryv1.VersionSpan{{Version: version, End: uint32(tokens), Digest: digest(version)}},
		Inline: &sessionv1.SegmentTokens{TokenIds: numbered(tokens), Logprobs: logprobs, RawLogprobs: logprobs, LossMask: mask},
	}
	for _, segment := range []*sessionv1.Segment{prompt, said} {
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(segment.GetInline())
		if err != nil {
			panic(err) // of bytes alone
		}
		segment.Crc32C = crc32.Checksum(raw, castagnoli)
	}
	return []*sessionv1.Segment{prompt, said}
}

// numbered is the token ids from 1000 on.
func numbered(n int) (raw []byte) {
	for i := range n {
		raw = binary.LittleEndian.AppendUint32(raw, uint32(1000+i))
	}
	return raw
}
