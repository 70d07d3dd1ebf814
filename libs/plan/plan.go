// Package plan has what planner and scheduler both know of plans.
package plan

// Format is the version of plans that this code writes and reads. A plan of another format is
// refused, never converted.
const Format = 2
