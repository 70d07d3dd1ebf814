package gateway

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/rollout-rl/rollout/libs/id"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
)

// reasonMissing is the error of a worker that has fewer segments of a session than the request
// says.
const reasonMissing = "SESSION_SEGMENTS_MISSING"

// conversation is a session during one request: a copy of its segments, and how it grows. Workers
// make the segments of chats, whose templates only they render; the segments of texts and tokens
// are made here. Not for several goroutines.
type conversation struct {
	store    Store
	id       string
	run      string
	chat     bool                        // whether all prompts are chats
	skipped  int                         // segments before those that were read
	segments []*Segment                  // the others, in the order of the store
	task     *Task                       // the sample that the session was issued for; nil: none
	params   *inferencev1.SamplingParams // of the request, if the session has no task
	forked   bool                        // whether another request appended to the session in the meantime
}

// open reads the session of a request; name "": a new one. Another gateway may have appended to it,
// so the store is read every time, except for segments that a worker has: a long chat would
// otherwise be read again in each turn.
func (s *service) open(ctx context.Context, name, run string, prompts []*inferencev1.Prompt) (*conversation, error) {
	c := &conversation{store: s.Store, id: cmp.Or(name, "sess-"+id.New(s.Now())), run: run, chat: true}
	for _, p := range prompts {
		c.chat = c.chat && p.GetChat() != nil
	}
	if name == "" {
		return c, nil
	}
	if c.chat {
		c.skipped = max(0, s.workers.cached(run, name)-1) // the last one shows that the session has them
	}
	found, err := s.Store.Session(ctx, name, c.skipped)
	if err == nil && c.skipped > 0 && len(found.GetSegments()) == 0 { // it expired and began again
		c.skipped = 0
		found, err = s.Store.Session(ctx, name, 0)
	}
	if errors.Is(err, ErrSession) {
		c.skipped = 0
		return c, nil
	}
	if err != nil {
		return nil, err
	}
	if found.GetRunId() != run {
		return nil, ErrSessionRun.WithMessage("session %s belongs to %s, not %s", name, found.GetRunId(), run)
	}
	if found.GetEnd() != nil {
		return nil, ErrSessionClosed.With("session", name)
	}
	c.segments, c.task = found.GetSegments(), found.GetTask()
	return c, nil
}

// floor is the oldest weights version to sample with: of the request, or of the trainer if that is
// newer.
func (c *conversation) floor(version *uint64) *uint64 {
	if oldest := c.task.GetMinWeightsVersion(); oldest > 0 && (version == nil || *version < oldest) {
		return &oldest
	}
	return version
}

// count is the number of segments.
func (c *conversation) count() int { return c.skipped + len(c.segments) }

// load reads the segments that were skipped.
func (c *conversation) load(ctx context.Context) error {
	if c.skipped == 0 {
		return nil
	}
	found, err := c.store.Session(ctx, c.id, 0)
	if err != nil {
		return err
	}
	c.segments = append(found.GetSegments()[:min(c.skipped, len(found.GetSegments()))], c.segments...)
	c.skipped = 0
	return nil
}

// state is what a worker needs to continue the session; nil if the worker does not need it.
func (c *conversation) state(ctx context.Context, w *worker) (*inferencev1.SessionState, error) {
	if !c.chat {
		return nil, nil
	}
	known := min(w.cache.known(c.id), c.count())
	if known < c.skipped {
		if err := c.load(ctx); err != nil {
			return nil, err
		}
	}
	state := &inferencev1.SessionState{SessionId: c.id, Known: uint32(known)}
	for _, s := range c.segments[known-c.skipped:] {
		state.Segments = append(state.Segments, s.GetSegment())
	}
	return state, nil
}

// append stores the segments of a completion that a worker has finished. They are durable when it
// returns.
func (c *conversation) append(ctx context.Context, w *worker, done *completion, prompt *inferencev1.Prompt) error {
	news, whole := done.segments, true
	if len(news) > 0 {
		whole = done.stitch()
	} else {
		if err := c.load(ctx); err != nil {
			return err
		}
		news = c.made(done)
	}
	rows := make([]*Segment, len(news))
	for i, segment := range news {
		rows[i] = &Segment{Segment: segment, RequestId: done.request, Time: timestamp(done.ended)}
	}
	last := rows[len(rows)-1]
	last.FinishReason, last.Text, last.Params = done.finish, done.text.String(), c.params
	if len(rows) > 1 {
		rows[0].Text = prompt.GetText()
	}
	first, err := c.store.Append(ctx, c.id, c.run, rows)
	if errors.Is(err, ErrSegmentConflict) { // another request of the session took the same ids
		c.forked = true
		rename(news, done)
		first, err = c.store.Append(ctx, c.id, c.run, rows)
	}
	if err != nil {
		return fmt.Errorf("store the session: %w", err)
	}
	c.forked = c.forked || !whole || first != c.count()
	c.segments = append(c.segments, rows...)
	if c.chat && len(done.segments) > 0 && !c.forked {
		w.cache.set(c.id, c.count())
	} else {
		w.cache.set(c.id, 0) // its copy is not the beginning of the stored session any more
	}
	return nil
}

// rename gives new segments ids that no other request uses.
func rename(segments []*sessionv1.Segment, done *completion) {
	names := map[string]string{}
	for _, s := range segments {
		name := fmt.Sprintf("%s-%s-%d-%d", s.GetSegmentId(), done.request, done.prompt, done.sample)
		names[s.GetSegmentId()] = name
		s.SegmentId = name
		if parent, ok := names[s.GetParentSegmentId()]; ok {
			s.ParentSegmentId = parent
		}
	}
}

// made is the segments of a prompt of text or tokens and of its completion. The prompt continues
// the longest path whose tokens it starts with.
func (c *conversation) made(done *completion) []*sessionv1.Segment {
	children := map[string][]*sessionv1.Segment{}
	for _, s := range c.segments {
		parent := s.GetSegment().GetParentSegmentId()
		children[parent] = append(children[parent], s.GetSegment())
	}
	ids := int32s(done.promptIDs)
	parent, used := longest(children, "", ids)
	var out []*sessionv1.Segment
	next := len(c.segments)
	if rest := ids[used:]; len(rest) > 0 {
		segment := &sessionv1.Segment{
			SegmentId: fmt.Sprintf("s%d", next), SessionId: c.id, ParentSegmentId: parent, Role: sessionv1.Role_ROLE_USER, Tokens: uint32(len(rest) / 4),
		}
		if len(children[parent]) > 0 {
			segment.ForkReason = sessionv1.ForkReason_FORK_REASON_HISTORY_EDITED
		}
		put(segment, &sessionv1.SegmentTokens{TokenIds: rest, LossMask: make([]byte, len(rest)/4)})
		out = append(out, segment)
		parent, next = segment.GetSegmentId(), next+1
	}
	turn := &sessionv1.Segment{
		SegmentId: fmt.Sprintf("s%d", next), SessionId: c.id, ParentSegmentId: parent, Role: sessionv1.Role_ROLE_ASSISTANT,
	}
	if len(out) == 0 && len(children[parent]) > 0 {
		turn.ForkReason = sessionv1.ForkReason_FORK_REASON_RESAMPLED
	}
	done.fill(turn)
	return append(out, turn)
}

// longest is the deepest segment whose path is a beginning of ids, and the bytes of that path.
func longest(children map[string][]*sessionv1.Segment, node string, ids []byte) (deepest string, used int) {
	deepest = node
	for _, child := range children[node] {
		own := child.GetInline().GetTokenIds()
		if !bytes.HasPrefix(ids, own) {
			continue
		}
		if name, n := longest(children, child.GetSegmentId(), ids[len(own):]); len(own)+n >= used {
			deepest, used = name, len(own)+n
		}
	}
	return deepest, used
}

// stitch makes the segment of the completion have every token that the caller was sent, also those
// of earlier workers, whose logprobs the last one does not have. It reports whether the worker's
// copy of the segment has the same tokens.
func (c *completion) stitch() (whole bool) {
	turn := c.segments[len(c.segments)-1]
	whole = bytes.Equal(turn.GetInline().GetTokenIds(), int32s(c.ids))
	if !whole || c.start > 0 {
		c.fill(turn)
	}
	return whole
}

// fill sets the arrays of the segment of the completion.
func (c *completion) fill(turn *sessionv1.Segment) {
	mask := bytes.Repeat([]byte{1}, len(c.ids))
	turn.Tokens, turn.VersionSpans = uint32(len(c.ids)), c.last.GetVersionSpans()
	tokens := &sessionv1.SegmentTokens{TokenIds: int32s(c.ids), Logprobs: float32s(c.logprobs), LossMask: mask}
	if len(c.raw) == len(c.ids) {
		tokens.RawLogprobs = float32s(c.raw)
	}
	put(turn, tokens)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// put sets the arrays of a segment and their checksum.
func put(segment *sessionv1.Segment, tokens *sessionv1.SegmentTokens) {
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(tokens)
	if err != nil {
		panic(err) // a message of four byte fields can be marshaled
	}
	segment.Inline, segment.Crc32C = tokens, crc32.Checksum(raw, castagnoli)
}

func int32s(ids []uint32) []byte {
	out := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		out = binary.LittleEndian.AppendUint32(out, id)
	}
	return out
}

func float32s(values []float32) []byte {
	out := make([]byte, 0, 4*len(values))
	for _, v := range values {
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(v))
	}
	return out
}

// cache is what one worker process has of sessions: how many segments, from the first. Safe for
// concurrent use.
type cache struct {
	mu       sync.Mutex
	segments map[string]int
}

// maxCached is how many sessions a cache has. A worker that is sent too much loses only time.
const maxCached = 16 << 10

func (c *cache) known(session string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.segments[session]
}

// set records the number of segments; 0: unknown.
func (c *cache) set(session string, segments int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if segments == 0 {
		delete(c.segments, session)
		return
	}
	if c.segments == nil || len(c.segments) >= maxCached {
		c.segments = map[string]int{}
	}
	c.segments[session] = segments
}
