package main

import (
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/config"
)

// Child processes (workers, and the planner's probe) run user code, such as rewards, which must not
// read the credentials of this process. A child gets only the credentials with which it connects
// itself, and a worker removes them from its environment before it starts another process
// (rollout_workers.worker.spec).

// ownCredentials are variables from which client libraries in this process read credentials, and
// the API key of the user who started it.
var ownCredentials = []string{
	"ROLLOUT_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGSSLPASSWORD",
}

// ownPrefixes are prefixes of the names of settings and credentials.
var ownPrefixes = []string{"ROLLOUTD_", "AWS_", "CONSUL_"}

// childEnv returns the environment of child processes: that of this process without its
// credentials, except those that `worker.env` passes on.
func childEnv(cfg config.Config, environ []string) []string {
	own := variables(secretRefs(cfg)...)
	return slices.DeleteFunc(slices.Clone(environ), func(e string) bool {
		name := nameOf(e)
		switch {
		case slices.Contains(own, name), exporterHeaders(name):
			return true
		case slices.Contains(cfg.Worker.Env, name):
			return false
		}
		return slices.Contains(ownCredentials, name) || slices.ContainsFunc(ownPrefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
	})
}

// workerEnv returns the environment of workers: childEnv, the headers for exporting spans and
// metrics, and the registry token if it is in a variable.
func workerEnv(cfg config.Config, e endpoints, environ []string) []string {
	token := variables(e.consulRef)
	return append(childEnv(cfg, environ), only(environ, func(name string) bool { return exporterHeaders(name) || slices.Contains(token, name) })...)
}

// busEnv returns the NATS credentials that are in variables, for workers that connect to NATS.
func busEnv(cfg config.Config, e endpoints, environ []string) []string {
	own := variables(e.natsToken, cfg.NATS.Password, cfg.NATS.NKey)
	return only(environ, func(name string) bool { return slices.Contains(own, name) })
}

// exporterHeaders reports whether a variable has headers for an OTLP collector, which may contain
// its key.
func exporterHeaders(name string) bool {
	return strings.HasPrefix(name, "OTEL_EXPORTER_OTLP_") && strings.HasSuffix(name, "HEADERS")
}

func secretRefs(cfg config.Config) (out []config.Ref) {
	for _, s := range cfg.Secrets() {
		out = append(out, s.Ref)
	}
	return out
}

// variables returns the names of the variables in references.
func variables(refs ...config.Ref) (out []string) {
	for _, r := range refs {
		if name, ok := r.Variable(); ok {
			out = append(out, name)
		}
	}
	return out
}

// only returns the variables whose names are wanted.
func only(environ []string, wanted func(name string) bool) []string {
	return slices.DeleteFunc(slices.Clone(environ), func(e string) bool { return !wanted(nameOf(e)) })
}

func nameOf(e string) string {
	name, _, _ := strings.Cut(e, "=")
	return name
}

func variable(environ []string, name string) string {
	for _, e := range environ {
		if value, ok := strings.CutPrefix(e, name+"="); ok {
			return value
		}
	}
	return ""
}
