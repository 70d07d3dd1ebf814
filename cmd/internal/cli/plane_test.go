package cli_test

import (
	"path/filepath"
	"testing"

	"github.com/rollout-rl/rollout/cmd/internal/cli"
)

func TestModelsOfTheLocalControlPlaneAreInItsStateFolder(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		plane cli.Plane
		want  string
	}{
		{cli.Plane{StateFlag: "/state"}, "/state/models"},
		{cli.Plane{StateFlag: "/state", Server: "host:1"}, "/jobs/sums/.rollout/models"},
	} {
		got, err := c.plane.ModelsDir("/jobs/sums")
		if err != nil || got != filepath.FromSlash(c.want) {
			t.Errorf("%+v: %s, %v, want %s", c.plane.Server, got, err, c.want)
		}
	}
}
