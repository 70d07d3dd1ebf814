package apikey_test

import (
	"errors"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

func TestLimiter(t *testing.T) {
	t.Parallel()
	var l apikey.Limiter
	now := time.Unix(1_700_000_000, 0)
	ada := &apikey.Record{Name: "ada", RequestsPerMinute: 3, TokensPerMinute: 600}
	bob := &apikey.Record{Name: "bob", RequestsPerMinute: 1}
	begin := func(r *apikey.Record, wait time.Duration) {
		t.Helper()
		err := l.Begin(r, now)
		e, _ := rpcerr.From(err)
		if wait == 0 && err != nil || wait > 0 && (!errors.Is(err, apikey.ErrRate) || e.RetryDelay().Round(time.Millisecond) != wait) {
			t.Errorf("%s: %v, want to wait %v", r.GetName(), err, wait)
		}
	}
	for range 3 {
		begin(ada, 0)
	}
	begin(ada, 20*time.Second)
	begin(bob, 0)
	begin(bob, time.Minute)
	now = now.Add(20 * time.Second)
	begin(ada, 0)
	now = now.Add(time.Hour)
	begin(ada, 0)
	l.Add(ada, 1200, now) // twice the limit: a minute of debt
	now = now.Add(30 * time.Second)
	begin(ada, 30*time.Second+100*time.Millisecond)
	now = now.Add(31 * time.Second)
	begin(ada, 0)
	free := &apikey.Record{Name: "eve"}
	for range 100 {
		begin(free, 0)
		l.Add(free, 1000, now)
	}
}

func TestKeysOfAgents(t *testing.T) {
	t.Parallel()
	for scope, want := range map[apikey.Scope]string{apikey.Sample: "any sample ", apikey.Session: "any sample session ", apikey.Read: "any read "} {
		got := ""
		for _, needed := range []apikey.Scope{apikey.Any, apikey.Sample, apikey.Session, apikey.Read, apikey.Submit, apikey.Admin, apikey.Mesh} {
			if scope.Allows(needed) {
				got += string(needed) + " "
			}
		}
		if got != want {
			t.Errorf("%s allows %s, want %s", scope, got, want)
		}
	}
}
