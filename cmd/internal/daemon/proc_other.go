//go:build !linux

package daemon

func zombie(int) bool { return false }

func stopped(int) bool { return false }
