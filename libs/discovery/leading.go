package discovery

import "strconv"

// MetaEpoch is the key under which the leader of a service registers the epoch of its term. Of a
// service with leaders only the instance with the highest epoch is called, because an older one may
// have died or been suspended without being detected yet.
const MetaEpoch = "epoch"

// leading drops instances with older epochs than the newest.
func leading(list []Instance) []Instance {
	newest := uint64(0)
	for _, i := range list {
		newest = max(newest, epoch(i))
	}
	var out []Instance
	for _, i := range list {
		if epoch(i) == newest {
			out = append(out, i)
		}
	}
	return out
}

// epoch is 0 for an instance without one.
func epoch(i Instance) uint64 {
	n, _ := strconv.ParseUint(i.Meta[MetaEpoch], 10, 64)
	return n
}
