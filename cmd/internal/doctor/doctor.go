// Package doctor checks the servers of rolloutd.toml as rolloutd uses them, and suggests fixes.
package doctor

import (
	"context"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/checkpoint"
	"github.com/rollout-rl/rollout/libs/config"
)

// Status is the result of a check.
type Status string

// Skipped: an earlier check of the server failed, or there is nothing to check.
const (
	OK      Status = "ok"
	Skipped Status = "skipped"
	Warning Status = "warning"
	Failed  Status = "failed"
)

// Finding is the result of one check.
type Finding struct {
	Server string `json:"server"` // state, local, sandbox, process, database, nats, consul, blob, tls
	Check  string `json:"check"`
	Status Status `json:"status"`
	Detail string `json:"detail,omitempty"`
	Fix    string `json:"fix,omitempty"`
}

const (
	// perServer is the timeout of the checks of one server.
	perServer = 20 * time.Second
	// skewMost is the maximum clock difference to a server: leases last two seconds.
	skewMost = time.Second
	// diskLeast is the minimum free space.
	diskLeast = 2 << 30
)

// Input is the configuration to check.
type Input struct {
	Config  config.Config
	Environ []string
	Sandbox string // path of rollout-sandbox; "" if it is not installed
	// Processes saves and restores processes of this host; nil: not checked.
	Processes checkpoint.Checkpointer
	Now       func() time.Time
}

// report collects the findings of one server.
type report struct {
	server string
	list   []Finding
}

func (r *report) ok(check, detail string) {
	r.list = append(r.list, Finding{Server: r.server, Check: check, Status: OK, Detail: detail})
}

func (r *report) warn(check, detail, fix string) {
	r.list = append(r.list, Finding{Server: r.server, Check: check, Status: Warning, Detail: detail, Fix: fix})
}

func (r *report) fail(check string, err error, fix string) {
	r.list = append(r.list, Finding{Server: r.server, Check: check, Status: Failed, Detail: err.Error(), Fix: fix})
}

func (r *report) skip(check, why string) {
	r.list = append(r.list, Finding{Server: r.server, Check: check, Status: Skipped, Detail: why})
}

// skew checks the clock of a server; between is the duration of the request.
func (r *report) skew(theirs, ours time.Time, between time.Duration) {
	off := theirs.Sub(ours).Abs()
	if off > skewMost+between {
		r.warn("clock", "it differs from the clock of this host by "+off.Round(time.Millisecond).String(), "run an NTP client (chrony, systemd-timesyncd) on both hosts")
		return
	}
	r.ok("clock", "within "+skewMost.String()+" of the clock of this host")
}

// Check checks all servers concurrently and returns the findings in a fixed order.
func Check(ctx context.Context, p Input) []Finding {
	checks := []struct {
		server string
		check  func(context.Context, Input, *report)
	}{{"state", state}, {"local", local}, {"sandbox", sandbox}, {"process", process}, {"database", database}, {"nats", nats}, {"consul", consul}, {"blob", blobs}, {"tls", certificates}}
	reports := make([]report, len(checks))
	var wg sync.WaitGroup
	for i, c := range checks {
		reports[i].server = c.server
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, perServer)
			defer cancel()
			c.check(ctx, p, &reports[i])
		})
	}
	wg.Wait()
	var out []Finding
	for _, r := range reports {
		out = append(out, r.list...)
	}
	return out
}

// Worst returns the worst status of the findings.
func Worst(findings []Finding) Status {
	rank := map[Status]int{OK: 0, Skipped: 0, Warning: 1, Failed: 2}
	worst := OK
	for _, f := range findings {
		if rank[f.Status] > rank[worst] {
			worst = f.Status
		}
	}
	return worst
}
