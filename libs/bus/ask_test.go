package bus

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// TestQuestionIsPutAgain: a question whose first answers are lost.
func TestQuestionIsPutAgain(t *testing.T) {
	refused := errors.New("refused")
	for name, c := range map[string]struct {
		deadline time.Duration // timeout of the caller; 0: none
		lost     int           // answers
		err      error         // of the answer that arrives
		put      int
		wantErr  error
		took     time.Duration
	}{
		"answered":            {time.Minute, 0, nil, 1, nil, 0},
		"lost twice":          {time.Minute, 2, nil, 3, nil, 2 * questionWait},
		"refused":             {time.Minute, 0, refused, 1, refused, 0},
		"lost, then refused":  {time.Minute, 1, refused, 2, refused, questionWait},
		"the caller's end":    {8 * time.Second, 9, nil, 2, context.DeadlineExceeded, 8 * time.Second},
		"no deadline":         {0, 1, nil, 2, nil, questionWait},
		"no deadline, silent": {0, 9, nil, 2, context.DeadlineExceeded, 2 * questionWait},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if c.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.deadline)
					defer cancel()
				}
				began, put := time.Now(), 0
				got, err := ask(ctx, func(ctx context.Context) (int, error) {
					if put++; put <= c.lost {
						<-ctx.Done()
						return 0, ctx.Err()
					}
					return put, c.err
				})
				if !errors.Is(err, c.wantErr) || put != c.put || time.Since(began) != c.took || err == nil && got != put {
					t.Errorf("%d, %v after %d questions and %v; want %d, %v, %v", got, err, put, time.Since(began), c.put, c.wantErr, c.took)
				}
			})
		})
	}
}
