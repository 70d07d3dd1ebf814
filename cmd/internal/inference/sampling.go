package inference

import (
	"fmt"
	"strings"

	"github.com/rollout-rl/rollout/cmd/internal/output"
	configv1 "github.com/rollout-rl/rollout/proto/gen/rollout/config/v1"
)

// Sampling are the settings that a completion depends on.
type Sampling struct {
	Samples     uint32   `json:"samples"`
	Temperature float64  `json:"temperature"`
	TopP        float64  `json:"top_p"`
	TopK        uint32   `json:"top_k"`
	MinP        float64  `json:"min_p"`
	MaxTokens   uint32   `json:"max_tokens"`
	Stop        []string `json:"stop"`
	Seed        uint64   `json:"seed"`
}

// SamplingOf returns those of a configuration.
func SamplingOf(c *configv1.RunConfig) Sampling {
	s := c.GetSampling()
	return Sampling{s.GetGroupSize(), s.GetTemperature(), s.GetTopP(), s.GetTopK(), s.GetMinP(), s.GetMaxTokens(), append([]string{}, s.GetStop()...), c.GetSeed()}
}

// String lists the settings; filters that are off are left out.
func (s Sampling) String() string {
	parts := []string{fmt.Sprintf("%d per row", s.Samples), "temperature " + output.Number(s.Temperature)}
	if s.Temperature == 0 {
		parts[1] += " (greedy)"
	}
	if s.TopP != 1 {
		parts = append(parts, "top_p "+output.Number(s.TopP))
	}
	if s.TopK != 0 {
		parts = append(parts, fmt.Sprintf("top_k %d", s.TopK))
	}
	if s.MinP != 0 {
		parts = append(parts, "min_p "+output.Number(s.MinP))
	}
	parts = append(parts, fmt.Sprintf("at most %s tokens", output.Count(s.MaxTokens)))
	for _, stop := range s.Stop {
		parts = append(parts, fmt.Sprintf("stop %q", stop))
	}
	return strings.Join(append(parts, fmt.Sprintf("seed %d", s.Seed)), ", ")
}
