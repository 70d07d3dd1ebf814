package gateway

import (
	"context"
	"slices"

	sessionv1 "github.com/rollout-rl/rollout/proto/gen/rollout/session/v1"
)

// Messages returns the messages of a session up to the completion of a request, oldest first, each
// as JSON in the form of OpenAI. ErrSession if the session has no such completion of a chat.
func (s *service) Messages(ctx context.Context, session, request string) ([]string, error) {
	found, err := s.Store.Session(ctx, session, 0)
	if err != nil {
		return nil, err
	}
	byID := map[string]*sessionv1.Segment{}
	var node *sessionv1.Segment // the last segment of the request is its completion
	for _, row := range found.GetSegments() {
		byID[row.GetSegment().GetSegmentId()] = row.GetSegment()
		if row.GetRequestId() == request {
			node = row.GetSegment()
		}
	}
	var path [][]string
	for ; node != nil; node = byID[node.GetParentSegmentId()] {
		path = append(path, node.GetMessages())
	}
	slices.Reverse(path)
	messages := slices.Concat(path...)
	if len(messages) == 0 {
		return nil, ErrSession
	}
	return messages, nil
}
