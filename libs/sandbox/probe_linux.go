package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"

	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
)

const cgroupFix = "run it as root, or in a delegated cgroup v2 (`systemd-run --user --scope -p Delegate=yes ...`), or in a container with writable cgroups"

// probe finds out what this host enforces. The namespaces are tried by building a box.
func (h *Host) probe() Report {
	r := Report{Root: os.Geteuid() == 0}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		r.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	limit := func(name string, c controller, fallback string) {
		e := Enforcement{Name: name, By: fallback}
		if c.version > 0 {
			e.By = fmt.Sprintf("cgroup v%d", c.version)
		} else {
			e.Why, e.Fix = c.why, cgroupFix
		}
		r.Limits = append(r.Limits, e)
	}
	r.Limits = append(r.Limits, Enforcement{Name: "wall_time_s", By: "supervisor"})
	limit(Memory, h.groups.memory, "rlimit and watch")
	limit(Pids, h.groups.pids, "rlimit")
	limit(CPUs, h.groups.cpu, None)
	r.Limits = append(r.Limits,
		Enforcement{Name: "output_bytes", By: "supervisor"}, Enforcement{Name: "disk_bytes", By: "tmpfs"},
		Enforcement{Name: "open_files", By: "rlimit"})

	r.Boundary = []Enforcement{
		{Name: "files", By: "mount namespace"}, {Name: "processes", By: "pid namespace"}, {Name: "network", By: "network namespace"},
		{Name: "uid", By: "user namespace"}, {Name: "syscalls", By: "seccomp"},
	}
	if r.Root {
		r.Boundary[3].By = fmt.Sprintf("user namespace, uid %d", hostID)
	}
	landlocked := Enforcement{Name: "landlock", By: None}
	if abi, err := ll.LandlockGetABIVersion(); err == nil && abi > 1 { // ABI 1 can't allow what the rules need (refer)
		landlocked.By = fmt.Sprintf("ABI %d", abi)
		h.landlock = true
	} else {
		landlocked.Why, landlocked.Fix = "the kernel has no Landlock of ABI 2 or later, or it is not in the list of its security modules",
			"files are still contained by the mount namespace; add landlock to the boot parameter lsm= for a second barrier"
	}
	r.Boundary = append(r.Boundary, landlocked)

	box, err := h.build(Spec{Network: NetworkNone, Limits: DefaultLimits})
	if err == nil {
		_, err = box.Run(context.Background(), Command{Argv: []string{"true"}, WallTimeS: 10})
		box.Close()
		var typed *Error
		if errors.As(err, &typed) && typed.Reason == ReasonNoFile {
			err = nil // this host has no such program; the box was built and the stage has run
		}
	}
	if err != nil {
		r.Error = hostError(err)
		for i := range r.Boundary[:5] {
			r.Boundary[i].By, r.Boundary[i].Why, r.Boundary[i].Fix = None, r.Error.Message, r.Error.Fix
		}
	}
	r.OK = r.Error == nil
	return r
}
