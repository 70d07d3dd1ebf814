package buffer

import (
	"fmt"

	trajectoryv1 "github.com/rollout-rl/rollout/proto/gen/rollout/trajectory/v1"
	"github.com/rollout-rl/rollout/services/buffer/segment"
)

// Arrival is one trajectory whose payload, where it has one inline, is in a segment already.
type Arrival struct {
	Header *trajectoryv1.TrajectoryHeader
	Place  segment.Place // zero where the payload is elsewhere or was not kept
	Ref    string        // content id in the storage service
	CRC    uint32
	Flaw   string // why the payload can't be kept, e.g. PAYLOAD_CORRUPT; "" is good

	payload []byte // to be appended to the buffer's own segment
}

// Refusal says why a trajectory was not accepted although its sample is wanted.
type Refusal struct {
	Reason  string
	Place   int // in the put
	Epoch   uint32
	Index   uint64
	Attempt uint32
	Sample  uint32
	Worker  string
}

func (r Refusal) String() string {
	return fmt.Sprintf("%s: sample %d of group %d/%d, attempt %d, by %s", r.Reason, r.Sample, r.Epoch, r.Index, r.Attempt,
		or(r.Worker, "an unnamed worker"))
}

// Tally is what became of some arrivals.
type Tally struct {
	Accepted   int
	Duplicates int
	Failed     int
	Refused    []Refusal
	Dissolved  int
}
