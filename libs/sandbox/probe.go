package sandbox

import "fmt"

// Enforcement is how this host enforces one limit or one boundary.
type Enforcement struct {
	Name string `json:"name"`
	By   string `json:"by"`            // cgroup v1, cgroup v2, rlimit, ...; "none": not enforced
	Why  string `json:"why,omitempty"` // why nothing better is available
	Fix  string `json:"fix,omitempty"`
}

// None is the value of Enforcement.By of a limit that this host can't enforce.
const None = "none"

// Report is what a host can do.
type Report struct {
	OK       bool          `json:"ok"` // a box can be built
	Error    *Error        `json:"error,omitempty"`
	Kernel   string        `json:"kernel"`
	Root     bool          `json:"root"` // started as root: commands get a separate uid
	Limits   []Enforcement `json:"limits"`
	Boundary []Enforcement `json:"boundaries"`
}

// By returns how a limit or a boundary is enforced.
func (r Report) By(name string) string {
	for _, list := range [][]Enforcement{r.Limits, r.Boundary} {
		for _, e := range list {
			if e.Name == name {
				return e.By
			}
		}
	}
	return None
}

// allow refuses a spec that asks for more than the host enforces.
func (r Report) allow(s Spec) error {
	if r.Error != nil {
		return r.Error
	}
	for _, e := range r.Limits {
		if e.By != None || e.Name == CPUs && s.Limits.CPUs == 0 {
			continue
		}
		optional := false
		for _, name := range s.BestEffort {
			optional = optional || name == e.Name
		}
		if !optional {
			return fail(ReasonLimit, fmt.Sprintf("%s, or add %q to best_effort", e.Fix, e.Name),
				"limits.%s can't be enforced on this host: %s", e.Name, e.Why)
		}
	}
	return nil
}
