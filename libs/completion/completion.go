// Package completion encodes and decodes the events that describe the samples of a step.
package completion

// Completion is one of the list that the attribute `completions` of the event of that kind holds as
// JSON.
type Completion struct {
	Epoch      uint32   `json:"epoch"`
	Index      uint64   `json:"index"`
	Sample     uint32   `json:"sample"`
	Prompt     string   `json:"prompt"`
	Completion string   `json:"completion"`
	Reward     float64  `json:"reward"`
	Advantage  *float64 `json:"advantage"` // nil: the algorithm has none
	Tokens     uint32   `json:"tokens"`
	Truncated  bool     `json:"truncated"`
}
