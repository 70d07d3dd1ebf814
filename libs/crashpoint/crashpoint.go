// Package crashpoint names the places between two durable effects at which a test kills the
// process.
//
//	crashpoint.Here("scheduler/advanced") // the cursor is durable, nothing is published
//
// In an ordinary build Here does nothing and is inlined away. Built with the tag `crashpoint`, it
// kills the process with SIGKILL where the file that $ROLLOUT_CRASH_FILE names holds just that
// name; the file is renamed first, so that each order is carried out once. e2e/test_crashpoints.py
// walks all of them; it finds them in the sources, so none can be forgotten. If the file holds
// "stop " and the name, the process suspends itself with SIGSTOP, and continues there after
// SIGCONT.
package crashpoint
