package doctor

import (
	"context"
	"fmt"
)

// process checks whether this host can save and restore processes, which snapshots of kind process
// need and nothing else does.
func process(ctx context.Context, p Input, r *report) {
	const check = "checkpoint"
	if p.Processes == nil {
		r.skip(check, "not checked")
		return
	}
	found := p.Processes.Probe(ctx)
	if found.OK {
		r.ok(check, fmt.Sprintf("CRIU %s saved and restored a process in %.0f ms", found.Version, found.Seconds*1000))
		return
	}
	if found.Program == "" {
		r.skip(check, found.Error.Message+"; only snapshots of kind process need it: "+found.Error.Fix)
		return
	}
	r.warn(check, "snapshots of kind process can't be taken here: "+found.Error.Message, found.Error.Fix)
}
