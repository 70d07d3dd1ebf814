package gateway

import (
	"cmp"
	"context"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// Tokenize returns the token ids of prompts for a policy; "" is the only one.
func (s *service) Tokenize(ctx context.Context, model string, req *inferencev1.TokenizeRequest) (*inferencev1.TokenizeResponse, error) {
	return ask(ctx, s.workers, model, func(w *worker) (*inferencev1.TokenizeResponse, error) { return w.client.Tokenize(ctx, req) })
}

// Detokenize returns the texts of token ids.
func (s *service) Detokenize(ctx context.Context, model string, req *inferencev1.DetokenizeRequest) (*inferencev1.DetokenizeResponse, error) {
	return ask(ctx, s.workers, model, func(w *worker) (*inferencev1.DetokenizeResponse, error) { return w.client.Detokenize(ctx, req) })
}

// ask calls a worker of the policy; another one if the first is not available.
func ask[T any](ctx context.Context, workers *directory, model string, call func(*worker) (T, error)) (out T, err error) {
	leave, err := workers.enter()
	if err != nil {
		return out, err
	}
	defer leave()
	run, _, err := workers.resolve(ctx, model)
	if err != nil {
		return out, err
	}
	n := need{avoid: map[string]bool{}}
	for {
		l, refusal := workers.acquire(ctx, run, n, 0, false)
		if refusal != nil {
			return out, cmp.Or(err, refusal)
		}
		n.avoid[l.id] = true
		out, err = call(l.worker)
		l.release(err, ctx.Err() != nil)
		if err == nil || ctx.Err() != nil || rpcerr.Code(err) != codes.Unavailable {
			return out, err
		}
	}
}
