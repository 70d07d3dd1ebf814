package bus

import (
	"context"
	"time"
)

// questionWait is how long a question about streams and consumers stays without an answer before it is put again. To make a stream with
// three replicas takes some tenths of a second.
const questionWait = 5 * time.Second

// ask puts a question that may be put twice, and puts it again while no answer comes and ctx lasts; where ctx has no deadline, once
// again. While the servers of a cluster elect their own leader questions are lost, and the client itself would wait until ctx ends.
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

// order is ask where the answer says no more than that it was done.
func order(ctx context.Context, question func(context.Context) error) error {
	_, err := ask(ctx, func(ctx context.Context) (struct{}, error) { return struct{}{}, question(ctx) })
	return err
}
