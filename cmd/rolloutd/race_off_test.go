//go:build !race

package main

// raced reports whether the race detector is compiled in.
const raced = false
