package apikey_test

import (
	"context"
	"errors"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// A key sees the runs of its project only; an unknown run and one of another project look alike.
func TestAKeySeesItsProject(t *testing.T) {
	t.Parallel()
	asked := 0
	projects := apikey.NewProjects(func(_ context.Context, run string) (string, error) {
		asked++
		switch run {
		case "run-math":
			return "math", nil
		case "run-default":
			return "", nil
		case "run-unreachable":
			return "", errors.New("away")
		}
		return "", rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "unknown")
	})
	math := apikey.With(t.Context(), &apikey.Record{Name: "ada", Project: "math"})
	plain := apikey.With(t.Context(), &apikey.Record{Name: "bob"})
	for _, c := range []struct {
		ctx  context.Context
		run  string
		sees bool
	}{
		{math, "run-math", true}, {math, "run-default", false}, {math, "run-x", false}, {math, "", false},
		{plain, "run-default", true}, {plain, "run-math", false}, {t.Context(), "run-math", true}, {t.Context(), "run-x", true},
	} {
		if sees, err := projects.Sees(c.ctx, c.run); sees != c.sees || err != nil {
			t.Errorf("%v sees %s: %v, %v", apikey.From(c.ctx), c.run, sees, err)
		}
		if err := projects.Check(c.ctx, c.run); c.sees != (err == nil) || err != nil && (rpcerr.Code(err) != codes.NotFound || rpcerr.Reason(err) != "RUN_NOT_FOUND") {
			t.Errorf("%v checks %s: %v", apikey.From(c.ctx), c.run, err)
		}
	}
	if asked > 5 {
		t.Errorf("asked %d times: the project of a run does not change", asked)
	}
	if sees, err := projects.Sees(math, "run-unreachable"); sees || err == nil {
		t.Error("a run is visible although its project is unknown")
	}
	if err := projects.CheckNew(math, "run-x"); err != nil {
		t.Errorf("a new run: %v", err)
	}
	if err := projects.CheckNew(math, "run-default"); rpcerr.Code(err) != codes.NotFound {
		t.Errorf("an existing run of another project: %v", err)
	}
	if err := (*apikey.Projects)(nil).Check(math, "run-default"); err != nil {
		t.Errorf("without projects: %v", err)
	}
}

func TestAKeyCreatesInItsProject(t *testing.T) {
	t.Parallel()
	math := apikey.With(t.Context(), &apikey.Record{Name: "ada", Project: "math"})
	for _, wanted := range []string{"", "math"} {
		if got, err := apikey.ProjectFor(math, wanted); got != "math" || err != nil {
			t.Errorf("%q: %q, %v", wanted, got, err)
		}
	}
	if _, err := apikey.ProjectFor(math, "code"); !errors.Is(err, apikey.ErrProject) {
		t.Errorf("another project: %v", err)
	}
	if got, err := apikey.ProjectFor(t.Context(), "code"); got != "code" || err != nil {
		t.Errorf("without a key: %q, %v", got, err)
	}
}
