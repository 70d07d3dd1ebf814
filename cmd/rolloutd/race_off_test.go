//go:build !race

package main

// raced tells that the race detector is compiled in.
const raced = false
