package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"strings"

	"google.golang.org/protobuf/proto"

	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	weightsv1 "github.com/rollout-rl/rollout/proto/gen/rollout/weights/v1"
)

// GroupID names a prompt group in a store.
func GroupID(key *trajectoryv1.TrajectoryKey) string {
	return fmt.Sprintf("%s/%d/%d/%d", key.GetRunId(), key.GetEpoch(), key.GetIndex(), key.GetAttempt())
}

// producer is the worker id of trajectories that the gateway makes.
const producer = "rollout-gateway"

// path is the segments from a root to a leaf.
type path []*Segment

// leaves returns the paths of a session: one for each completion that nothing was sampled after, in
// the order in which they were sampled.
func leaves(session *Session) []path {
	parents := map[string]*Segment{}
	inner := map[string]bool{}
	for _, s := range session.GetSegments() {
		parents[s.GetSegment().GetSegmentId()] = s
		if !byPolicy(s) {
			continue
		}
		for at := parents[s.GetSegment().GetParentSegmentId()]; at != nil; at = parents[at.GetSegment().GetParentSegmentId()] {
			inner[at.GetSegment().GetSegmentId()] = true
		}
	}
	var out []path
	for _, s := range session.GetSegments() {
		if !byPolicy(s) || inner[s.GetSegment().GetSegmentId()] {
			continue
		}
		var p path
		for at := s; at != nil; at = parents[at.GetSegment().GetParentSegmentId()] {
			p = append(path{at}, p...)
		}
		out = append(out, p)
	}
	return out
}

// byPolicy reports whether the policy sampled the segment.
func byPolicy(s *Segment) bool { return s.GetSegment().GetRole() == sessionv1.Role_ROLE_ASSISTANT }

// trained reports whether samples of an outcome are trained on.
func trained(o trajectoryv1.Outcome) bool {
	return o == trajectoryv1.Outcome_OUTCOME_COMPLETED || o == trajectoryv1.Outcome_OUTCOME_TRUNCATED
}

// trajectories are the trajectories of a closed session, one part per leaf. A token that several
// leaves share is trained by the first of them: the leaves of a session have one reward, so the
// mean of their advantages is the advantage of each. A session that is not trained on becomes one
// trajectory without tokens.
func trajectories(session *Session) ([]*trajectoryv1.TrajectoryEnvelope, error) {
	paths := leaves(session)
	if !trained(session.GetEnd().GetOutcome()) {
		paths = []path{nil}
	}
	seen := map[string]bool{}
	out := make([]*trajectoryv1.TrajectoryEnvelope, len(paths))
	for part, p := range paths {
		t, h := p.encode(session.GetEnd(), seen)
		key := proto.CloneOf(session.GetTask().GetKey())
		key.Part = uint32(part)
		t.Key, h.Key = key, key
		h.GroupSize, h.Row, h.Parts, h.WorkerId = session.GetTask().GetGroupSize(), session.GetTask().GetRow(), uint32(len(paths)), producer
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(t)
		if err != nil {
			return nil, err
		}
		out[part] = &trajectoryv1.TrajectoryEnvelope{Header: h, Payload: raw, Crc32C: crc32.Checksum(raw, castagnoli)}
	}
	return out, nil
}

// encode makes the trajectory of a path. seen has the segments that earlier paths train.
func (p path) encode(end *End, seen map[string]bool) (*trajectoryv1.Trajectory, *trajectoryv1.TrajectoryHeader) {
	t := &trajectoryv1.Trajectory{Outcome: end.GetOutcome(), Reason: end.GetReason(), Reward: end.GetReward(), Metrics: end.GetMetrics()}
	h := &trajectoryv1.TrajectoryHeader{Outcome: end.GetOutcome(), Reason: end.GetReason(), Reward: end.GetReward()}
	if len(p) == 0 {
		return t, h
	}
	h.Path = &trajectoryv1.TrajectoryPath{SessionId: p[0].GetSegment().GetSessionId()}
	var ids, logprobs, raw, mask bytes.Buffer
	allRaw, begun, answers := true, false, false // answers: the next segment answers messages in the completion
	prompt, completion := strings.Builder{}, strings.Builder{}
	var covered, at uint32 // completion tokens that have a span; completion tokens so far
	for _, s := range p {
		segment := s.GetSegment()
		n, tokens := segment.GetTokens(), segment.GetInline()
		h.Path.SegmentIds = append(h.Path.SegmentIds, segment.GetSegmentId())
		ids.Write(tokens.GetTokenIds())
		switch {
		case byPolicy(s):
			begun = true
			logprobs.Write(tokens.GetLogprobs())
			if allRaw = allRaw && len(tokens.GetRawLogprobs()) == int(4*n); allRaw {
				raw.Write(tokens.GetRawLogprobs())
			}
			if seen[segment.GetSegmentId()] {
				mask.Write(make([]byte, n))
			} else {
				mask.Write(tokens.GetLossMask())
			}
			seen[segment.GetSegmentId()] = true
			if answers {
				completion.WriteString("[assistant] ")
			}
			completion.WriteString(s.GetText())
			for _, span := range segment.GetVersionSpans() {
				t.VersionSpans = appendSpan(t.VersionSpans, span, covered, at+span.GetEnd())
				covered = at + span.GetEnd()
			}
		default:
			logprobs.Write(make([]byte, 4*n))
			raw.Write(make([]byte, 4*n))
			mask.Write(make([]byte, n))
			if begun {
				completion.WriteString(said(s))
			} else {
				prompt.WriteString(said(s))
			}
		}
		if begun {
			at += n
			answers = !byPolicy(s) && len(segment.GetMessages()) > 0
		} else {
			t.PromptTokens += n
		}
	}
	t.TokenIds, t.Logprobs, t.LossMask = ids.Bytes(), logprobs.Bytes(), mask.Bytes()
	if allRaw {
		t.RawLogprobs = raw.Bytes()
	}
	t.Prompt, t.Completion, t.Turns = prompt.String(), completion.String(), p.turns()
	h.Tokens, h.CompletionTokens = t.GetPromptTokens()+at, at
	for i, span := range t.GetVersionSpans() {
		if i == 0 || span.GetVersion() < h.GetMinVersion() {
			h.MinVersion = span.GetVersion()
		}
		if i == 0 || span.GetVersion() >= h.GetMaxVersion() {
			h.MaxVersion = span.GetVersion()
			h.Receipt = &weightsv1.WeightsReceipt{Version: span.GetVersion(), Digest: span.GetDigest()}
		}
	}
	return t, h
}

// turns are what the policy sampled and read, in order and without gaps. Segments that were read
// one after the other are one turn.
func (p path) turns() []*trajectoryv1.Turn {
	var out []*trajectoryv1.Turn
	var at uint32
	for _, s := range p {
		segment, start := s.GetSegment(), at
		at += segment.GetTokens()
		if n := len(out); n == 0 || byPolicy(s) || out[n-1].GetSampled() {
			out = append(out, &trajectoryv1.Turn{Sampled: byPolicy(s), Start: start})
		}
		turn := out[len(out)-1]
		turn.End = at
		turn.Messages = append(turn.Messages, segment.GetMessages()...)
		if len(segment.GetMessages()) == 0 {
			turn.Text += s.GetText()
		}
	}
	return out
}

// appendSpan adds the tokens from start to end. Tokens between two completions belong to the span
// after them.
func appendSpan(spans []*trajectoryv1.VersionSpan, span *trajectoryv1.VersionSpan, start, end uint32) []*trajectoryv1.VersionSpan {
	if n := len(spans); n > 0 && spans[n-1].GetVersion() == span.GetVersion() && spans[n-1].GetDigest() == span.GetDigest() {
		spans[n-1].End = end
		return spans
	}
	return append(spans, &trajectoryv1.VersionSpan{Version: span.GetVersion(), Start: start, End: end, Digest: span.GetDigest()})
}

// said is the text of a segment of a prompt: its messages, each with its role. The turns are shown
// by `rollout completions`.
func said(s *Segment) string {
	if len(s.GetSegment().GetMessages()) == 0 {
		return s.GetText()
	}
	var out strings.Builder
	for _, raw := range s.GetSegment().GetMessages() {
		var message struct {
			Role    string `json:"role"`
			Content any    `json:"content"`
		}
		if json.Unmarshal([]byte(raw), &message) != nil {
			continue
		}
		content, ok := message.Content.(string)
		if !ok && message.Content != nil {
			parts, _ := json.Marshal(message.Content)
			content = string(parts)
		}
		fmt.Fprintf(&out, "\n[%s] %s\n", message.Role, content)
	}
	return out.String()
}
