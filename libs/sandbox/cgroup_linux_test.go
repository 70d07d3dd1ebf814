package sandbox

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func TestControllersOfCgroupV2ShareOneParent(t *testing.T) {
	t.Parallel()
	// What each folder passes on to the groups in it.
	for name, test := range map[string]struct {
		passes                  map[string][]string
		own                     string
		memory, pids, cpu, lost string
	}{
		"at one level": {
			passes: map[string][]string{"/cg/a": {"memory.max", "pids.max", "cpu.max"}}, own: "/cg/a/b",
			memory: "/cg/a", pids: "/cg/a", cpu: "/cg/a",
		},
		"at different levels": {
			passes: map[string][]string{"/cg": {"memory.max", "pids.max", "cpu.max"}, "/cg/a": {"memory.max", "pids.max"}, "/cg/a/b": {"memory.max"}}, own: "/cg/a/b",
			memory: "/cg", pids: "/cg", cpu: "/cg",
		},
		"with one that is not allowed above": {
			passes: map[string][]string{"/cg/a": {"pids.max"}, "/cg/a/b": {"memory.max"}}, own: "/cg/a/b",
			pids: "/cg/a", lost: "/cg/a/b",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found := hierarchies{
				own: map[string]string{"v2": test.own, "v2 mount": "/cg"},
				try: func(parent, file string) error {
					if slices.Contains(test.passes[parent], file) {
						return nil
					}
					return os.ErrPermission
				},
				has: func(string, string) bool { return true },
			}.find()
			for name, one := range map[string]struct {
				got  controller
				want string
			}{"memory": {found.memory, test.memory}, "pids": {found.pids, test.pids}, "cpu": {found.cpu, test.cpu}} {
				if one.got.parent != one.want || (one.got.version == 2) != (one.want != "") || one.want == "" && one.got.why == "" {
					t.Errorf("%s: %+v, want the parent %q", name, one.got, one.want)
				}
			}
			if test.lost != "" && !strings.Contains(found.memory.why, test.lost) {
				t.Errorf("why memory is not enforced: %q", found.memory.why)
			}
			if parents := found.parents(); len(parents) > 1 {
				t.Errorf("a process can't be in all of %s", parents)
			}
		})
	}
}
