package controller

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/rollout-rl/rollout/libs/id"
	fencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/fence/v1"
)

// scratch has the folders in which a drive prepares snapshots. Their names end with the incarnation
// and the epoch of the leader, so that a former leader which continues late writes, and removes,
// none of its successor's files.
type scratch struct {
	folder             string
	incarnation, epoch uint64
}

func newScratch(runDirectory string, by *fencev1.Fence) scratch {
	return scratch{folder: filepath.Join(runDirectory, "state"), incarnation: uint64(by.GetIncarnation()), epoch: by.GetLeaderEpoch()}
}

// dir is the folder for a purpose, such as step-000012.
func (s scratch) dir(purpose string) string {
	return filepath.Join(s.folder, fmt.Sprintf("%s-i%d-e%d", purpose, s.incarnation, s.epoch))
}

// newDir is a folder for a purpose that no call before has returned. A learner that was asked
// before may still write.
func (s scratch) newDir(purpose string) string {
	return s.dir(purpose + "-" + id.New(time.Now()))
}

var scratchName = regexp.MustCompile(`-i(\d+)-e(\d+)$`)

// sweep removes the folders that former leaders have left, and none of a newer one.
func (s scratch) sweep() error {
	entries, err := os.ReadDir(s.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, entry := range entries {
		var incarnation, epoch uint64 // 0 in the names of earlier versions
		if m := scratchName.FindStringSubmatch(entry.Name()); m != nil {
			incarnation, _ = strconv.ParseUint(m[1], 10, 64)
			epoch, _ = strconv.ParseUint(m[2], 10, 64)
		}
		if incarnation < s.incarnation || incarnation == s.incarnation && epoch < s.epoch {
			err = errors.Join(err, os.RemoveAll(filepath.Join(s.folder, entry.Name())))
		}
	}
	return err
}
