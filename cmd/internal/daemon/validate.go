package daemon

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"

	"google.golang.org/protobuf/proto"

	planv1 "github.com/rollout-rl/rollout/proto/gen/rollout/plan/v1"
)

// ValidateArgument makes rolloutd validate one configuration: it reads a ValidateConfigRequest from
// its input, writes the response to its output, and exits.
const ValidateArgument = "validate-config"

// Validate validates a configuration without a control plane. The rules are part of rolloutd.
func Validate(ctx context.Context, request *planv1.ValidateConfigRequest) (*planv1.ValidateConfigResponse, error) {
	binary, err := FindBinary()
	if err != nil {
		return nil, err
	}
	in, err := proto.Marshal(request)
	if err != nil {
		return nil, err
	}
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, binary, ValidateArgument)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("validate with %s: %w %s", binary, err, bytes.TrimSpace(said.Bytes()))
	}
	response := &planv1.ValidateConfigResponse{}
	if err := proto.Unmarshal(out, response); err != nil {
		return nil, fmt.Errorf("validate with %s: %w", binary, err)
	}
	return response, nil
}
