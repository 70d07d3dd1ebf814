package scheduler

import (
	"fmt"

	"github.com/rollout-rl/rollout/libs/algorithm"
	"github.com/rollout-rl/rollout/libs/bus"
	"github.com/rollout-rl/rollout/proto/gen/names"
	runv1 "github.com/rollout-rl/rollout/proto/gen/rollout/run/v1"
	"github.com/rollout-rl/rollout/services/scheduler/dataset"
)

// message builds the prompt group of a position, and the id by which the stream drops a twin of the same incarnation.
func (i *issuer) message(it item) (bus.Message, error) {
	place := dataset.PlaceOf(it.position, i.data.rows)
	row := i.order.Row(place)
	text, err := i.file.Row(row)
	if err != nil {
		return bus.Message{}, err
	}
	config := i.record.GetPlan().GetConfig()
	size := algorithm.GroupSize(config)
	group := &runv1.PromptGroup{
		RunId: i.c.id, Epoch: place.Epoch, Index: place.Index, Attempt: it.attempt, Position: it.position,
		Row: row, RowJson: text, GroupSize: size,
		Seeds:      dataset.Seeds(config.GetSeed(), place, int(size)),
		MinVersion: i.c.window.MinVersion(it.position, i.c.window.made(i.c.ledger())),
	}
	return bus.Message{
		Subject: names.WorkSubject(i.c.id), Body: group,
		ID: fmt.Sprintf("%s/%d/%d/%d/%d", i.c.id, place.Epoch, place.Index, it.attempt, i.record.GetIncarnation()),
	}, nil
}
