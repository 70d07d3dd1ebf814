// Package trainstate names the parts of a training state: a folder that a learner writes and whose
// files a snapshot stores.
package trainstate

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	snapshotv1 "github.com/rollout-rl/rollout/proto/gen/rollout/snapshot/v1"
)

// Parts of a training state. A folder is a part with all its files.
const (
	// Weights is a folder in the Hugging Face layout. A state with adapters has none.
	Weights = "weights"
	// Adapter is a folder in the layout of PEFT.
	Adapter = "adapter"
	// Base is the folder of the model that the adapters belong to: a copy of the files of the plan.
	// A learner loads its own model instead.
	Base = "base"
	// Critic is a file.
	Critic = "critic.safetensors"
)

// Parts of a snapshot that are not a training state.
const (
	// Ledger is the folder of the groups that no step had consumed.
	Ledger = "buffer"
	// LedgerRows is the file of their rows.
	LedgerRows = "buffer/rows.binpb"
	// LedgerPayloads is the file of their payloads.
	LedgerPayloads = "buffer/payloads.bin"
	// Episodes is the folder of the open episodes.
	Episodes = "episodes"
	// Processes is the folder of process images.
	Processes = "processes"
)

// State returns a copy of a snapshot with the files of its training state.
func State(s *snapshotv1.Snapshot) *snapshotv1.Snapshot {
	return without(s, func(f *snapshotv1.SnapshotFile) bool { return In(f, Ledger) || In(f, Episodes) || In(f, Processes) })
}

// Has reports whether a snapshot has a part.
func Has(s *snapshotv1.Snapshot, part string) bool {
	return slices.ContainsFunc(s.GetFiles(), func(f *snapshotv1.SnapshotFile) bool { return In(f, part) })
}

// Adapted reports whether the weights of a snapshot are its adapters merged into its base.
func Adapted(s *snapshotv1.Snapshot) bool { return Has(s, Adapter) && !Has(s, Weights) }

// In reports whether a file belongs to a part.
func In(f *snapshotv1.SnapshotFile, part string) bool {
	return f.GetPath() == part || strings.HasPrefix(f.GetPath(), part+"/")
}

// Only returns a copy of a snapshot with the files of some parts.
func Only(s *snapshotv1.Snapshot, parts ...string) *snapshotv1.Snapshot {
	return without(s, func(f *snapshotv1.SnapshotFile) bool {
		return !slices.ContainsFunc(parts, func(part string) bool { return In(f, part) })
	})
}

// Without returns a copy of a snapshot without the files of a part.
func Without(s *snapshotv1.Snapshot, part string) *snapshotv1.Snapshot {
	return without(s, func(f *snapshotv1.SnapshotFile) bool { return In(f, part) })
}

// Paths returns the paths of the files of a snapshot.
func Paths(s *snapshotv1.Snapshot) []string {
	var out []string
	for _, f := range s.GetFiles() {
		out = append(out, f.GetPath())
	}
	return out
}

func without(s *snapshotv1.Snapshot, unwanted func(*snapshotv1.SnapshotFile) bool) *snapshotv1.Snapshot {
	s = proto.CloneOf(s)
	s.Files = slices.DeleteFunc(s.Files, unwanted)
	return s
}
