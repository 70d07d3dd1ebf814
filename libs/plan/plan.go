// Package plan has the definitions of plans that planner and scheduler share.
package plan

// Format is the version of plans that this code writes and reads. A plan of another format is
// refused, never converted.
const Format = 2
