// Package doctor looks at every server that rolloutd.toml names, as rolloutd would use it, and says how to fix what is wrong.
package doctor

import (
	"context"
	"sync"
	"time"

	"github.com/rollout-rl/rollout/libs/config"
)

// Status is how a check went.
type Status string

// The states, from good to bad. Skipped: an earlier check of the same server failed, or there is no such server.
const (
	OK      Status = "ok"
	Skipped Status = "skipped"
	Warning Status = "warning"
	Failed  Status = "failed"
)

// Finding is one thing that was looked at.
type Finding struct {
	Server string `json:"server"` // state, local, database, nats, consul, blob, tls
	Check  string `json:"check"`
	Status Status `json:"status"`
	Detail string `json:"detail,omitempty"`
	Fix    string `json:"fix,omitempty"`
}

const (
	// perServer bounds the look at one server.
	perServer = 20 * time.Second
	// skewMost is how far a server's clock may be from ours: leases live for two seconds.
	skewMost = time.Second
	// diskLeast is free space below which a run soon stops.
	diskLeast = 2 << 30
)

// Patient is what is looked at.
type Patient struct {
	Config  config.Config
	Environ []string
	Now     func() time.Time
}

// report gathers the findings of one server.
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

// skew judges a server's clock; between is how long the question took.
func (r *report) skew(theirs, ours time.Time, between time.Duration) {
	off := theirs.Sub(ours).Abs()
	if off > skewMost+between {
		r.warn("clock", "it differs from this host's by "+off.Round(time.Millisecond).String(), "run an NTP client (chrony, systemd-timesyncd) on both hosts")
		return
	}
	r.ok("clock", "within "+skewMost.String()+" of this host's")
}

// Look asks all servers at a time and gives the findings in a fixed order.
func Look(ctx context.Context, p Patient) []Finding {
	checks := []struct {
		server string
		look   func(context.Context, Patient, *report)
	}{{"state", state}, {"local", local}, {"database", database}, {"nats", nats}, {"consul", consul}, {"blob", blobs}, {"tls", certificates}}
	reports := make([]report, len(checks))
	var wg sync.WaitGroup
	for i, c := range checks {
		reports[i].server = c.server
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, perServer)
			defer cancel()
			c.look(ctx, p, &reports[i])
		})
	}
	wg.Wait()
	var out []Finding
	for _, r := range reports {
		out = append(out, r.list...)
	}
	return out
}

// Worst is the worst state of some findings.
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
