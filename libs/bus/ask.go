package bus

import (
	"context"
	"time"
)

// questionWait is how long to wait for the answer to a request about streams and consumers before
// it is sent again. Creating a stream with three replicas takes a few tenths of a second.
const questionWait = 5 * time.Second

// ask sends an idempotent request and repeats it until there is an answer or ctx ends; if ctx has
// no deadline, it repeats it once. Requests are lost while the servers of a cluster elect their
// leader, and the client itself would wait until ctx ends.
func ask[T any](ctx context.Context, question func(context.Context) (T, error)) (T, error) {
	_, ends := ctx.Deadline()
	for put := 1; ; put++ {
		own, cancel := context.WithTimeout(ctx, questionWait)
		answer, err := question(own)
		lost := err != nil && own.Err() != nil
		cancel()
		if !lost || ctx.Err() != nil || !ends && put == 2 {
			return answer, err
		}
	}
}

// order is ask for requests whose answer only confirms that they were done.
func order(ctx context.Context, question func(context.Context) error) error {
	_, err := ask(ctx, func(ctx context.Context) (struct{}, error) { return struct{}{}, question(ctx) })
	return err
}
