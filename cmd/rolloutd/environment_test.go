package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/rollout-rl/rollout/libs/config"
)

// Child processes run user code, which must not read the credentials of the daemon. "probe" is the
// planner's, "worker" is any worker, "linked" is one that connects to NATS.
func TestWhoGetsWhichVariable(t *testing.T) {
	t.Parallel()
	cfg := config.Default(t.TempDir())
	cfg.Database.URL = "env:PLANTED_DATABASE"
	cfg.Blob.SecretKey, cfg.Blob.Credentials = config.Env("PLANTED_S3"), config.Env("PLANTED_GCS")
	cfg.NATS.Token, cfg.NATS.Password, cfg.NATS.NKey = config.Env("PLANTED_TOKEN"), config.Env("PLANTED_PASSWORD"), config.Env("PLANTED_NKEY")
	cfg.Consul.Token = config.Env("PLANTED_CONSUL")
	cfg.Worker.Env = []string{"AWS_PROFILE", "PGPASSWORD", "NOT_SET"}
	e := endpoints{natsToken: cfg.NATS.Token, consulRef: cfg.Consul.Token}
	all := []string{"probe", "worker", "linked"}
	var environ []string
	rows := map[string][]string{
		"PATH": all, "HOME": all, "OPENAI_API_KEY": all, "OTEL_EXPORTER_OTLP_ENDPOINT": all, "ROLLOUT_SIM_SECONDS": all,
		"AWS_PROFILE": all, "PGPASSWORD": all, // according to worker.env
		"PLANTED_TOKEN": {"linked"}, "PLANTED_PASSWORD": {"linked"}, "PLANTED_NKEY": {"linked"},
		"PLANTED_CONSUL": {"worker", "linked"}, "OTEL_EXPORTER_OTLP_HEADERS": {"worker", "linked"}, "OTEL_EXPORTER_OTLP_TRACES_HEADERS": {"worker", "linked"},
		"PLANTED_DATABASE": nil, "PLANTED_S3": nil, "PLANTED_GCS": nil, "ROLLOUT_API_KEY": nil, "ROLLOUTD_LISTEN": nil,
		"AWS_SECRET_ACCESS_KEY": nil, "AWS_SESSION_TOKEN": nil, "GOOGLE_APPLICATION_CREDENTIALS": nil, "PGPASSFILE": nil, "CONSUL_HTTP_TOKEN": nil,
	}
	for name := range rows {
		environ = append(environ, name+"=x")
	}
	worker := workerEnv(cfg, e, environ)
	given := map[string][]string{
		"probe": childEnv(cfg, environ), "worker": worker, "linked": append(slices.Clone(worker), busEnv(cfg, e, environ)...),
	}
	for name, wanted := range rows {
		var got []string
		for _, who := range all {
			if slices.Contains(given[who], name+"=x") {
				got = append(got, who)
			}
		}
		if !slices.Equal(got, wanted) {
			t.Errorf("%s reaches %s; it should reach %s", name, strings.Join(got, ", "), strings.Join(wanted, ", "))
		}
	}
}
