//go:build !crashpoint

package crashpoint

// Here marks a place between two durable effects.
func Here(string) {}
