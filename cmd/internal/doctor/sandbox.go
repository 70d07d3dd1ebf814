package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
)

// sandbox checks what rollout-sandbox enforces on this host. Runs without tools need none of it.
func sandbox(ctx context.Context, p Input, r *report) {
	const check = "limits"
	if p.Sandbox == "" {
		r.skip(check, "rollout-sandbox is not installed; tools and sandboxed rewards need it")
		return
	}
	// It exits with a code if no box can be built; the reason is in its output.
	out, err := exec.CommandContext(ctx, p.Sandbox, "probe", "--format", "json").Output()
	type enforcement struct{ Name, By string }
	var found struct {
		Error              *struct{ Message, Fix string }
		Limits, Boundaries []enforcement
	}
	if e := json.Unmarshal(out, &found); e != nil {
		r.warn(check, "rollout-sandbox can't be run: "+errors.Join(err, e).Error(), "build it again with `make build`")
		return
	}
	if found.Error != nil {
		r.warn(check, found.Error.Message, found.Error.Fix)
		return
	}
	var by []string
	for _, e := range append(found.Limits, found.Boundaries...) {
		if e.Name == "memory_bytes" || e.Name == "pids" || e.Name == "cpus" || e.Name == "landlock" {
			by = append(by, e.Name+" by "+e.By)
		}
	}
	r.ok(check, strings.Join(by, ", "))
}
