package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/rollout-rl/rollout/cmd/internal/output"
)

// state checks the state folder of this host.
func state(_ context.Context, p Input, r *report) {
	dir := p.Config.StateDir
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) { // it may not exist yet
		if _, err := os.Stat(dir); err == nil {
			break
		}
	}
	f, err := os.CreateTemp(dir, ".doctor-*")
	if err != nil {
		r.fail("writable", err, "make it writable for the user of rolloutd, or set state_dir to another folder")
		return
	}
	_ = f.Close()
	_ = os.Remove(f.Name())
	r.ok("writable", p.Config.StateDir)
	var fs syscall.Statfs_t
	if err := syscall.Statfs(dir, &fs); err != nil {
		r.fail("disk", err, "")
		return
	}
	free := fs.Bavail * uint64(fs.Bsize)
	if free < diskLeast {
		r.warn("disk", output.Bytes(free)+" free", "free some space, or set state_dir to a larger disk")
		return
	}
	r.ok("disk", "enough is free")
}

// least checks that a version "MAJOR.MINOR.." is at least major.minor.
func least(r *report, product, version string, major, minor int) {
	var gotMajor, gotMinor int
	if _, err := fmt.Sscanf(version, "%d.%d", &gotMajor, &gotMinor); err != nil {
		r.warn("version", "it is not reported", "")
		return
	}
	if gotMajor < major || gotMajor == major && gotMinor < minor {
		r.fail("version", fmt.Errorf("%s %s", product, version), fmt.Sprintf("use %s %d.%d or newer", product, major, minor))
		return
	}
	r.ok("version", product+" "+version)
}

func fixOf(err error, known map[error]string, otherwise string) string {
	for target, fix := range known {
		if errors.Is(err, target) {
			return fix
		}
	}
	return otherwise
}
