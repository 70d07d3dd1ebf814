package credential_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/credential"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

func issue(incarnation uint32, now time.Time) string {
	return credential.Issue("mesh", credential.For("run-1", "learner", incarnation, now))
}

// The clock of a service may be ahead by the allowance, and behind by any time.
func TestACredentialExpires(t *testing.T) {
	t.Parallel()
	made := time.Unix(1_000_000, 0)
	for after, want := range map[time.Duration]error{
		-48 * time.Hour: nil, 0: nil, credential.Lifetime: nil, credential.Lifetime + credential.Skew: nil,
		credential.Lifetime + credential.Skew + time.Second: credential.ErrExpired, 48 * time.Hour: credential.ErrExpired,
	} {
		authority := credential.NewAuthority("mesh", func() time.Time { return made.Add(after) })
		if _, worker, err := authority.Check(t.Context(), issue(1, made)); !worker || !errors.Is(err, want) {
			t.Errorf("%v after its issue: %v, %v; want %v", after, worker, err, want)
		}
		if _, worker, err := authority.Check(t.Context(), "mesh"); worker || err != nil {
			t.Errorf("a text that is no credential: %v, %v", worker, err)
		}
	}
}

// A credential ends with its incarnation and its run, within a second and at once after a pause.
func TestACredentialEndsWithItsIncarnation(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		authority := credential.NewAuthority("mesh", nil)
		check := func(incarnation uint32) error {
			_, _, err := authority.Check(t.Context(), issue(incarnation, time.Now()))
			return err
		}
		if err := check(1); err != nil {
			t.Errorf("before there is a scheduler: %v", err)
		}
		asked, now, answer := 0, credential.Standing{Incarnation: 1}, error(nil)
		authority.Follow(func(context.Context, string) (credential.Standing, error) {
			asked++
			return now, answer
		})
		for range 100 {
			if err := check(1); err != nil {
				t.Fatal(err)
			}
		}
		if asked != 1 {
			t.Errorf("asked %d times within a second", asked)
		}
		if err := check(2); err != nil {
			t.Errorf("the next incarnation has begun since the last answer: %v", err)
		}
		now.Incarnation = 2
		<-time.After(time.Hour)
		if err := check(1); !errors.Is(err, credential.ErrRevoked) {
			t.Errorf("the first call of a former worker after a pause: %v", err)
		}
		if err := check(2); err != nil {
			t.Errorf("the newest incarnation: %v", err)
		}
		answer = rpcerr.New(codes.Unavailable, "AWAY", "away")
		<-time.After(2 * time.Second)
		if err := errors.Join(check(2), check(2)); err != nil {
			t.Errorf("the scheduler is away: %v", err)
		}
		if err := check(1); !errors.Is(err, credential.ErrRevoked) {
			t.Errorf("a former worker while the scheduler is away: %v", err)
		}
		answer, now.Ended = nil, true
		<-time.After(2 * time.Second)
		if err := check(2); !errors.Is(err, credential.ErrRevoked) {
			t.Errorf("the run has ended: %v", err)
		}
		if err := check(3); err != nil {
			t.Errorf("the ended run was resumed: %v", err)
		}
		answer = rpcerr.New(codes.NotFound, "RUN_NOT_FOUND", "deleted")
		<-time.After(2 * time.Second)
		if err := check(2); !errors.Is(err, credential.ErrRevoked) {
			t.Errorf("the run is deleted: %v", err)
		}
	})
}

// A scheduler that does not answer delays the calls of a quarter of a second for each question.
func TestAnAuthorityDoesNotWaitForAStuckScheduler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		authority := credential.NewAuthority("mesh", nil)
		authority.Follow(func(ctx context.Context, _ string) (credential.Standing, error) {
			<-ctx.Done()
			return credential.Standing{}, ctx.Err()
		})
		began := time.Now()
		if _, _, err := authority.Check(t.Context(), issue(1, began)); err != nil {
			t.Fatal(err)
		}
		if waited := time.Since(began); waited > time.Second {
			t.Errorf("waited %v", waited)
		}
		began = time.Now()
		for range 100 {
			if _, _, err := authority.Check(t.Context(), issue(1, began)); err != nil {
				t.Fatal(err)
			}
		}
		if waited := time.Since(began); waited > 0 {
			t.Errorf("the calls during the question waited %v, too", waited)
		}
		<-time.After(time.Minute) // its question ends
	})
}
