package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// finish makes paths absolute, fills in what follows from other keys, and reports everything that
// is wrong at once.
func (c Config) finish() (Config, error) {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, k := range keys {
		if r, ok := k.field(&c).(*Ref); ok {
			if err := r.absolute(); err != nil {
				fail("path %q: %w", r, err)
			}
		}
	}
	if reference(c.Database.URL) {
		r := Ref{c.Database.URL}
		if err := r.absolute(); err != nil {
			fail("path %q: %w", r, err)
		}
		c.Database.URL = r.text
	}
	for _, p := range c.paths() {
		if *p == "" {
			continue
		}
		abs, err := filepath.Abs(*p)
		if err != nil {
			fail("path %q: %w", *p, err)
		}
		*p = abs
	}
	if c.SharedDir == "" {
		c.SharedDir = c.StateDir
	}
	for name, address := range map[string]string{"listen": c.Listen, "gateway.listen": c.Gateway.Listen, "nats.listen": c.NATS.Listen, "consul.listen": c.Consul.Listen} {
		if _, _, err := net.SplitHostPort(address); err != nil {
			fail("%s: %q is not host:port: %w", name, address, err)
		}
	}
	errs = append(errs, c.plainText()...)
	errs = append(errs, c.TLS.check()...)
	errs = append(errs, c.NATS.check()...)
	errs = append(errs, c.Consul.check()...)
	errs = append(errs, c.Blob.check()...)
	errs = append(errs, c.Database.check()...)
	if !slices.Contains([]string{"fsync", "process"}, c.Buffer.Durability) {
		fail("buffer.durability: %q is neither fsync nor process", c.Buffer.Durability)
	}
	if !slices.Contains([]string{"text", "json"}, c.Log.Format) {
		fail("log.format: %q is neither text nor json", c.Log.Format)
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.Log.Level) {
		fail("log.level: %q is none of debug, info, warn, error", c.Log.Level)
	}
	if c.Drain <= 0 {
		fail("drain: %v is not a positive duration", c.Drain)
	}
	if len(c.Target) == 0 {
		fail("target: name at least one, or all")
	}
	if c.Join == c.StateDir {
		fail("join: is this process's own state folder; give each process its own")
	}
	if c.Buffer.SegmentBytes < 0 {
		fail("buffer.segment_bytes: %d is below 0", c.Buffer.SegmentBytes)
	}
	for name, days := range map[string]int{
		"succeeded_days": c.Retention.SucceededDays, "failed_days": c.Retention.FailedDays, "cancelled_days": c.Retention.CancelledDays, "events_days": c.Retention.EventsDays,
	} {
		if days < 0 || days > 36500 {
			fail("retention.%s: %d is not between 0 (never) and 36500", name, days)
		}
	}
	if c.Retention.EndedRuns < 0 {
		fail("retention.ended_runs: %d is below 0", c.Retention.EndedRuns)
	}
	if c.Retention.TelemetryRecentMinutes < 1 {
		fail("retention.telemetry_recent_minutes: %d is not a positive integer", c.Retention.TelemetryRecentMinutes)
	}
	if 60*c.Retention.TelemetryFineHours < c.Retention.TelemetryRecentMinutes {
		fail("retention.telemetry_fine_hours: %d hours are less than retention.telemetry_recent_minutes, %d", c.Retention.TelemetryFineHours, c.Retention.TelemetryRecentMinutes)
	}
	if c.Worker.Cores < 0 {
		fail("worker.cores: %d is below 0", c.Worker.Cores)
	}
	if c.Worker.LogBytes < 1<<16 {
		fail("worker.log_bytes: %d is below 65536", c.Worker.LogBytes)
	}
	if c.Worker.LogRate < 1 {
		fail("worker.log_lines_per_second: %d is not a positive integer", c.Worker.LogRate)
	}
	errs = append(errs, c.Launch.check()...)
	errs = append(errs, c.passedOn()...)
	return c, errors.Join(errs...)
}

// check reports kinds of launchers that do not exist.
func (l Launch) check() (errs []error) {
	for _, key := range []struct{ name, value string }{
		{"launch.kind", l.Kind}, {"launch.learner.kind", cmp.Or(l.Learner.Kind, LaunchLocal)}, {"launch.inference.kind", cmp.Or(l.Inference.Kind, LaunchLocal)},
		{"launch.reward.kind", cmp.Or(l.Reward.Kind, LaunchLocal)}, {"launch.environment.kind", cmp.Or(l.Environment.Kind, LaunchLocal)},
	} {
		if !slices.Contains(launchers, key.value) {
			errs = append(errs, fmt.Errorf("%s: %q is not one of %s", key.name, key.value, strings.Join(launchers, ", ")))
		}
	}
	all, used := LaunchGroup{Partition: l.Partition, Account: l.Account, TimeLimit: l.TimeLimit, Options: l.Options}, l.Kind == LaunchSlurm
	groups, merged := map[string]LaunchGroup{"learner": l.Learner, "inference": l.Inference, "reward": l.Reward, "environment": l.Environment}, l.Groups()
	for _, worker := range slices.Sorted(maps.Keys(groups)) {
		slurm := merged[worker].Kind == LaunchSlurm
		used = used || slurm
		errs = append(errs, groups[worker].check("launch."+worker, slurm)...)
	}
	return append(errs, all.check("launch", used)...)
}

var (
	slurmTime   = regexp.MustCompile(`^([0-9]+-[0-9]+(:[0-9]+){0,2}|[0-9]+(:[0-9]+){0,2})$`)
	slurmMemory = regexp.MustCompile(`^[0-9]+[KMGT]?$`)
	// slurmReserved are the options of sbatch by which the launcher finds, stops, and reads its jobs.
	slurmReserved = []string{
		"array", "chdir", "clusters", "comment", "error", "export", "export-file", "open-mode", "output", "requeue", "signal", "test-only", "wait", "wrap",
	}
)

// check reports what is wrong in a table. slurm: workers of the table are jobs of Slurm.
func (g LaunchGroup) check(table string, slurm bool) (errs []error) {
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(table+"."+format, args...)) }
	given := g
	given.Kind = ""
	if given != (LaunchGroup{}) && !slurm {
		return []error{fmt.Errorf("%s: partition, account, time_limit, options, cpus, gpus, and memory are for kind = %q alone", table, LaunchSlurm)}
	}
	if g.TimeLimit != "" && !slurmTime.MatchString(g.TimeLimit) {
		fail("time_limit: %q is not a time limit of Slurm; write minutes, hours:minutes:seconds, or days-hours", g.TimeLimit)
	}
	if g.Memory != "" && !slurmMemory.MatchString(g.Memory) {
		fail("memory: %q is not a size of Slurm; write 16G", g.Memory)
	}
	if g.CPUs < 0 {
		fail("cpus: %d is below 0", g.CPUs)
	}
	if g.GPUs < 0 {
		fail("gpus: %d is below 0", g.GPUs)
	}
	for option := range strings.FieldsSeq(g.Options) {
		if !strings.HasPrefix(option, "--") {
			fail("options: %q does not begin with --; write --name=value", option)
			continue
		}
		name, _, _ := strings.Cut(option, "=")
		for _, reserved := range slurmReserved { // sbatch accepts the beginning of a name
			if len(name) > len("--") && strings.HasPrefix("--"+reserved, name) {
				fail("options: %q changes what rolloutd relies on to follow its jobs (--%s); remove it", option, reserved)
				break
			}
		}
	}
	return errs
}

// passedOn reports problems of the variables that workers get.
func (c Config) passedOn() (errs []error) {
	secrets := c.Secrets()
	for _, name := range c.Worker.Env {
		if !variableName.MatchString(name) {
			errs = append(errs, fmt.Errorf("worker.env: %q is not a variable name", name))
		}
		if strings.HasPrefix(name, envPrefix) || name == "ROLLOUT_API_KEY" {
			errs = append(errs, fmt.Errorf("worker.env: %s is reserved for rolloutd and its launcher; pass values for rewards in another variable", name))
		}
		for _, s := range secrets {
			if s.Ref == Env(name) {
				errs = append(errs, fmt.Errorf("worker.env: %s holds the secret of %s, which is rolloutd's own; give rewards one of theirs, in another variable", name, s.Key))
			}
		}
	}
	return errs
}

// Loopback reports whether the host of host:port is this machine's own.
func Loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return true // reported already
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}
