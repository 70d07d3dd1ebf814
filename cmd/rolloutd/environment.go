package main

import (
	"slices"
	"strings"

	"github.com/rollout-rl/rollout/libs/config"
)

// Children run the code of people who need neither our databases nor our buckets: the planner's probe and the workers call rewards.
// So no child finds a credential of ours in its environment but those that it connects with, and these the worker takes out of its
// environment before it starts anybody else (rollout_workers.worker.spec).

// ownCredentials are variables in which clients that this process is made of look for credentials without being told to, and the key
// of whoever started it: of a daemon that is their CLI.
var ownCredentials = []string{
	"ROLLOUT_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGSSLPASSWORD",
}

// ownPrefixes are those of rolloutd's settings, and of credentials of which there are many.
var ownPrefixes = []string{"ROLLOUTD_", "AWS_", "CONSUL_"}

// childEnv is what every child gets: our environment without what is ours alone, but for what `worker.env` passes on.
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

// workerEnv is what every worker gets: that, the headers of its exporter of spans and metrics, and the token with which it registers
// where that is in a variable.
func workerEnv(cfg config.Config, e endpoints, environ []string) []string {
	token := variables(e.consulRef)
	return append(childEnv(cfg, environ), only(environ, func(name string) bool { return exporterHeaders(name) || slices.Contains(token, name) })...)
}

// busEnv is what workers get that connect to NATS: the credentials that are in variables.
func busEnv(cfg config.Config, e endpoints, environ []string) []string {
	own := variables(e.natsToken, cfg.NATS.Password, cfg.NATS.NKey)
	return only(environ, func(name string) bool { return slices.Contains(own, name) })
}

// exporterHeaders reports whether a variable holds headers for a collector, which carry its keys.
func exporterHeaders(name string) bool {
	return strings.HasPrefix(name, "OTEL_EXPORTER_OTLP_") && strings.HasSuffix(name, "HEADERS")
}

func secretRefs(cfg config.Config) (out []config.Ref) {
	for _, s := range cfg.Secrets() {
		out = append(out, s.Ref)
	}
	return out
}

// variables are the names of those that references lead to.
func variables(refs ...config.Ref) (out []string) {
	for _, r := range refs {
		if name, ok := r.Variable(); ok {
			out = append(out, name)
		}
	}
	return out
}

// only keeps the variables whose names are wanted.
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
