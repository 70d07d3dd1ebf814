package scheduler

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/rollout-rl/rollout/libs/crashpoint"
	bufferv1 "github.com/rollout-rl/rollout/proto/gen/rollout/buffer/v1"
	eventv1 "github.com/rollout-rl/rollout/proto/gen/rollout/event/v1"
)

// AttemptsExhausted is the reason of groups that failed in each of their attempts.
const AttemptsExhausted = "ATTEMPTS_EXHAUSTED"

// settle gives dissolved groups their next attempt, or excludes them after the last.
func (i *issuer) settle(ctx context.Context, dissolved []*bufferv1.GroupRecord) error {
	attempts := max(1, i.record.GetPlan().GetConfig().GetLimits().GetGroupAttempts())
	var again, out []*bufferv1.GroupRecord
	settled := map[uint64]uint32{} // what is told no more never will be again
	for _, g := range dissolved {
		delete(i.owed, g.GetPosition()) // its next attempt is not open yet, or was published after all
		switch attempt, acted := i.settled[g.GetPosition()]; {
		case acted && attempt == g.GetKey().GetAttempt():
			settled[g.GetPosition()] = attempt
		case g.GetFailures() < attempts: // going stale is no failure
			again = append(again, g)
		default:
			out = append(out, g)
		}
	}
	i.settled = settled
	for _, p := range slices.Sorted(maps.Keys(i.owed)) {
		again = append(again, i.owed[p])
	}
	if err := i.reissue(ctx, again); err != nil {
		return err
	}
	return i.exclude(ctx, out)
}

func (i *issuer) reissue(ctx context.Context, groups []*bufferv1.GroupRecord) error {
	if len(groups) == 0 {
		return nil
	}
	req := &bufferv1.ReissueGroupsRequest{RunId: i.c.id, Incarnation: i.c.incarnation}
	var items []item
	for _, g := range groups {
		k := g.GetKey()
		req.Groups = append(req.Groups, &bufferv1.GroupKey{Epoch: k.GetEpoch(), Index: k.GetIndex(), Attempt: k.GetAttempt() + 1})
		items = append(items, item{position: g.GetPosition(), attempt: k.GetAttempt() + 1})
		i.owed[g.GetPosition()] = g
	}
	if _, err := i.c.svc.Buffer.ReissueGroups(ctx, req); err != nil {
		return fmt.Errorf("open the next attempt of %d groups: %w", len(groups), moved(err))
	}
	crashpoint.Here("scheduler/reissued") // the next attempt is open, its work not published
	if err := i.publish(ctx, items); err != nil {
		return err
	}
	i.remember(groups)
	clear(i.owed)
	return nil
}

func (i *issuer) exclude(ctx context.Context, groups []*bufferv1.GroupRecord) error {
	if len(groups) == 0 {
		return nil
	}
	req := &bufferv1.ExcludeGroupsRequest{RunId: i.c.id, Incarnation: i.c.incarnation, Reason: AttemptsExhausted}
	for _, g := range groups {
		req.Groups = append(req.Groups, g.GetKey())
	}
	if _, err := i.c.svc.Buffer.ExcludeGroups(ctx, req); err != nil {
		return fmt.Errorf("exclude %d groups: %w", len(groups), moved(err))
	}
	crashpoint.Here("scheduler/excluded") // the ledger has it, nobody was told
	for _, g := range groups {
		name := fmt.Sprintf("%d/%d", g.GetKey().GetEpoch(), g.GetKey().GetIndex())
		i.c.svc.emit(i.record, &eventv1.Event{
			Kind: "group.excluded", Level: eventv1.Level_LEVEL_WARN, Step: i.c.ledger().GetStep(),
			Message:    fmt.Sprintf("group %s is left out: %d attempts failed, the last for %s", name, g.GetFailures(), g.GetReason()),
			Attributes: map[string]string{"group": name, "reason": AttemptsExhausted, "last_reason": g.GetReason()},
		})
	}
	i.remember(groups)
	return nil
}

func (i *issuer) remember(groups []*bufferv1.GroupRecord) {
	for _, g := range groups {
		i.settled[g.GetPosition()] = g.GetKey().GetAttempt()
	}
}
