package rpc

import "testing"

// No message is read into a buffer of more than twice its size, which would be cleared for it.
func TestBuffersAreAboutAsLargeAsMessages(t *testing.T) {
	t.Parallel()
	pool, err := buffers()
	if err != nil {
		t.Fatal(err)
	}
	for size := 2000; size <= 1<<20; size = size * 5 / 4 {
		if got := cap(*pool.Get(size)); got > 2*size {
			t.Errorf("%d bytes for a message of %d", got, size)
		}
	}
}
