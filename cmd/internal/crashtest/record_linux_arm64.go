package crashtest

var legacy map[uint64]string
