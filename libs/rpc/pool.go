package rpc

import (
	"fmt"

	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/mem"
)

// PoolBuffers sets the sizes of the buffers that this process reads messages into; call it before
// anything else of gRPC. gRPC's own have a gap from 32 KiB to 1 MiB, and a buffer is cleared whole
// before it is used: a message of 70 KiB cleared 1 MiB.
func PoolBuffers() error {
	pool, err := buffers()
	if err != nil {
		return fmt.Errorf("make a pool of buffers: %w", err)
	}
	experimental.SetDefaultBufferPool(pool)
	return nil
}

// buffers have the sizes of powers of two, from 256 bytes to 1 MiB.
func buffers() (mem.BufferPool, error) {
	return mem.NewBinaryTieredBufferPool(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
}
