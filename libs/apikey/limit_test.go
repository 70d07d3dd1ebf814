package apikey_test

import (
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

func TestLimiter(t *testing.T) {
	t.Parallel()
	var l apikey.Limiter
	now := time.Unix(1_700_000_000, 0)
	ada := apikey.Record{Name: "ada", Limits: apikey.Limits{RequestsPerMinute: 3, TokensPerMinute: 600}}
	bob := apikey.Record{Name: "bob", Limits: apikey.Limits{RequestsPerMinute: 1}}
	begin := func(r apikey.Record, wait time.Duration) {
		t.Helper()
		err := l.Begin(r, now)
		e, _ := rpcerr.From(err)
		if wait == 0 && err != nil || wait > 0 && (!errors.Is(err, apikey.ErrRate) || e.RetryDelay().Round(time.Millisecond) != wait) {
			t.Errorf("%s: %v, want to wait %v", r.Name, err, wait)
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
	free := apikey.Record{Name: "eve"}
	for range 100 {
		begin(free, 0)
		l.Add(free, 1000, now)
	}
}

func TestKeysExpire(t *testing.T) {
	t.Parallel()
	keep := apikey.Keep{Path: filepath.Join(t.TempDir(), "keys.json")}
	now := time.Now()
	past, future := now.Add(-time.Hour), now.Add(time.Hour)
	for _, bad := range []apikey.Limits{{Expires: &past}, {RequestsPerMinute: -1}, {TokensPerMinute: -1}} {
		if _, err := keep.Create("bad", apikey.Sample, bad, now); !errors.Is(err, apikey.ErrLimit) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	key, err := keep.Create("ada", apikey.Sample, apikey.Limits{Expires: &future, TokensPerMinute: 5}, now)
	if err != nil {
		t.Fatal(err)
	}
	if got, ok, err := apikey.Open(keep.Path).Find(key); !ok || err != nil || got.TokensPerMinute != 5 || !got.Expires.Equal(future.Truncate(time.Second)) {
		t.Errorf("got %+v, %v, %v", got, ok, err)
	}
	old, err := keep.Create("bob", apikey.Sample, apikey.Limits{Expires: &past}, past.Add(-time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := apikey.Open(keep.Path).Find(old); ok || !errors.Is(err, apikey.ErrExpired) || rpcerr.Fix(err) == "" {
		t.Errorf("an expired key: %v, %v", ok, err)
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
