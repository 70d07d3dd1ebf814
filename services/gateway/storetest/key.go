package storetest

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	keyv1 "github.com/rollout-rl/rollout/proto/gen/rollout/key/v1"
	"github.com/rollout-rl/rollout/services/gateway"
)

var created = time.UnixMilli(1_700_000_000_000).UTC()

// key is a key whose hash is that of its name.
func key(name string) *apikey.Record {
	return &apikey.Record{Name: name, Scope: "sample", Sha256: apikey.Hash(name), Created: timestamppb.New(created)}
}

// add stores keys that are new.
func add(t *testing.T, store gateway.Store, keys ...*apikey.Record) {
	t.Helper()
	if n, err := store.AddKeys(t.Context(), keys); n != len(keys) || err != nil {
		t.Fatalf("added %d of %d keys, %v", n, len(keys), err)
	}
}

func equal(a, b *apikey.Record) bool { return proto.Equal(a, b) }

func uniqueKeys(t *testing.T, store gateway.Store) {
	t.Helper()
	ada := &apikey.Record{
		Name: "ada", Scope: "submit", Sha256: apikey.Hash("ada"), Created: timestamppb.New(created), Project: "math",
		Expires: timestamppb.New(created.Add(time.Hour)), RequestsPerMinute: 3, TokensPerMinute: 1 << 30, LastUsed: timestamppb.New(created.Add(time.Minute)),
	}
	add(t, store, ada)
	sameName, sameHash, bob := key("ada"), key("eve"), key("bob")
	sameName.Sha256, sameHash.Sha256 = apikey.Hash("other"), ada.GetSha256()
	if n, err := store.AddKeys(t.Context(), []*apikey.Record{sameName, sameHash, bob}); n != 1 || err != nil {
		t.Errorf("added %d keys, %v; want bob", n, err)
	}
	if _, keys, err := store.Keys(t.Context(), 0); err != nil || !slices.EqualFunc(keys, []*apikey.Record{ada, bob}, equal) {
		t.Errorf("got %v, %v", keys, err)
	}
}

func revisions(t *testing.T, store gateway.Store) {
	t.Helper()
	known := int64(0)
	check := func(changed bool, names ...string) {
		t.Helper()
		revision, keys, err := store.Keys(t.Context(), known)
		if err != nil || (revision != known) != changed || changed != (keys != nil || len(names) == 0 && changed) {
			t.Fatalf("revision %d after %d, keys %v, %v", revision, known, keys, err)
		}
		var got []string
		for _, k := range keys {
			got = append(got, k.GetName())
		}
		if !slices.Equal(got, names) {
			t.Errorf("keys %v, want %v", got, names)
		}
		known = revision
	}
	check(false)
	add(t, store, key("ada"), key("bob"))
	check(true, "ada", "bob")
	check(false)
	if n, err := store.AddKeys(t.Context(), []*apikey.Record{key("ada")}); n != 0 || err != nil {
		t.Errorf("added again: %d, %v", n, err)
	}
	if removed, err := store.RemoveKey(t.Context(), "eve"); removed || err != nil {
		t.Errorf("removed eve: %v, %v", removed, err)
	}
	check(false)
	for _, name := range []string{"ada", "bob"} {
		if removed, err := store.RemoveKey(t.Context(), name); !removed || err != nil {
			t.Errorf("removed %s: %v, %v", name, removed, err)
		}
	}
	check(true)
	add(t, store, key("ada"))
	check(true, "ada")
}

func concurrentKeys(t *testing.T, store gateway.Store) {
	t.Helper()
	const writers, each = 4, 8
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				name := fmt.Sprintf("key-%d-%d", w, i)
				if n, err := store.AddKeys(t.Context(), []*apikey.Record{key(name)}); n != 1 || err != nil {
					t.Errorf("%s: %d, %v", name, n, err)
				}
			}
		})
	}
	wg.Wait()
	if revision, keys, err := store.Keys(t.Context(), 0); revision != writers*each || len(keys) != writers*each || err != nil {
		t.Errorf("revision %d, %d keys, %v", revision, len(keys), err)
	}
}

func pages(t *testing.T, store gateway.Store) {
	t.Helper()
	add(t, store, key("c"), key("a-b"), key("a.b"), key("a"))
	var names []string
	for after := ""; ; {
		keys, err := store.ListKeys(t.Context(), after, 2)
		if err != nil {
			t.Fatal(err)
		}
		if len(keys) == 0 {
			break
		}
		for _, k := range keys {
			names = append(names, k.GetName())
		}
		after = names[len(names)-1]
	}
	if want := []string{"a", "a-b", "a.b", "c"}; !slices.Equal(names, want) {
		t.Errorf("listed %v, want %v", names, want)
	}
}

func uses(t *testing.T, store gateway.Store) {
	t.Helper()
	add(t, store, key("ada"), key("bob"))
	before, _, err := store.Keys(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, minutes := range []int{5, 3} {
		use := &keyv1.ApiKeyUse{Sha256: apikey.Hash("ada"), Time: timestamppb.New(created.Add(time.Duration(minutes) * time.Minute))}
		unknown := &keyv1.ApiKeyUse{Sha256: apikey.Hash("eve"), Time: use.GetTime()}
		if err := store.UseKeys(t.Context(), []*keyv1.ApiKeyUse{use, unknown}); err != nil {
			t.Fatal(err)
		}
	}
	keys, err := store.ListKeys(t.Context(), "", 9)
	if err != nil || len(keys) != 2 || !keys[0].GetLastUsed().AsTime().Equal(created.Add(5*time.Minute)) || keys[1].GetLastUsed() != nil {
		t.Errorf("got %v, %v", keys, err)
	}
	if after, _, err := store.Keys(t.Context(), 0); after != before || err != nil {
		t.Errorf("a use changed the revision from %d to %d, %v", before, after, err)
	}
}

func expiredKeys(t *testing.T, store gateway.Store) {
	t.Helper()
	old, later := key("old"), key("later")
	old.Expires, later.Expires = timestamppb.New(created.Add(time.Hour)), timestamppb.New(created.Add(3*time.Hour))
	add(t, store, old, later, key("forever"))
	for _, want := range []int{1, 0} {
		if n, err := store.ExpireKeys(t.Context(), created.Add(2*time.Hour)); n != want || err != nil {
			t.Errorf("deleted %d keys, %v; want %d", n, err, want)
		}
	}
	if _, keys, err := store.Keys(t.Context(), 0); err != nil || len(keys) != 2 {
		t.Errorf("got %v, %v", keys, err)
	}
}
