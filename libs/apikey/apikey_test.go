package apikey_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/rollout-rl/rollout/libs/apikey"
	"github.com/rollout-rl/rollout/libs/apikey/apikeytest"
)

func TestScopes(t *testing.T) {
	t.Parallel()
	order := []apikey.Scope{apikey.Read, apikey.Submit, apikey.Admin, apikey.Mesh}
	for i, have := range order {
		for j, need := range order {
			if have.Allows(need) != (i >= j) {
				t.Errorf("%s for %s", have, need)
			}
		}
	}
	if apikey.Scope("").Allows(apikey.Read) || apikey.Admin.Allows("") {
		t.Error("an empty scope is valid")
	}
}

func TestNewKeysAreChecked(t *testing.T) {
	t.Parallel()
	now := time.Now()
	past := timestamppb.New(now.Add(-time.Hour))
	for _, c := range []struct {
		record *apikey.Record
		want   error
	}{
		{&apikey.Record{Name: "a b", Scope: "read"}, apikey.ErrName},
		{&apikey.Record{Name: "", Scope: "read"}, apikey.ErrName},
		{&apikey.Record{Name: "ada", Scope: "root"}, apikey.ErrScope},
		{&apikey.Record{Name: "ada", Scope: string(apikey.Mesh)}, apikey.ErrScope},
		{&apikey.Record{Name: "ada", Scope: "read", Expires: past}, apikey.ErrLimit},
		{&apikey.Record{Name: "ada", Scope: "read", RequestsPerMinute: -1}, apikey.ErrLimit},
		{&apikey.Record{Name: "ada", Scope: "read", TokensPerMinute: -1}, apikey.ErrLimit},
		{&apikey.Record{Name: "ci@example.org", Scope: "read"}, nil},
	} {
		if _, err := apikey.New(c.record, now); !errors.Is(err, c.want) {
			t.Errorf("%v: %v, want %v", c.record, err, c.want)
		}
	}
}

// find returns whether a key is accepted.
func find(t *testing.T, keys *apikeytest.Keys, key string) (ok bool, err error) {
	t.Helper()
	found, err := keys.Ring.Find(t.Context(), key)
	return found != nil, err
}

// A new key is accepted at once, and a revoked one refused a second later.
func TestKeysComeAndGo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys := apikeytest.New(t)
		if ok, err := find(t, keys, "rk-unknown"); ok || err != nil {
			t.Errorf("an unknown key: %v %v", ok, err)
		}
		began := time.Now()
		ada := keys.Create(t, &apikey.Record{Name: "ada", Scope: "submit"}, time.Now())
		bob := keys.Create(t, &apikey.Record{Name: "bob", Scope: "read"}, time.Now())
		for _, key := range []string{ada, bob} {
			if ok, err := find(t, keys, key); !ok || err != nil {
				t.Errorf("%v %v", ok, err)
			}
			if ok, err := find(t, keys, key+"x"); ok || err != nil {
				t.Errorf("a longer key: %v %v", ok, err)
			}
		}
		if waited := time.Since(began); waited > 500*time.Millisecond {
			t.Errorf("four keys waited %v", waited)
		}
		keys.Revoke("ada")
		<-time.After(1100 * time.Millisecond)
		if ok, err := find(t, keys, ada); ok || err != nil {
			t.Errorf("a revoked key: %v %v", ok, err)
		}
		if ok, err := find(t, keys, bob); !ok || err != nil {
			t.Errorf("another key: %v %v", ok, err)
		}
		if ok, err := find(t, keys, apikey.Hash(bob)); ok || err != nil {
			t.Errorf("a hash: %v %v", ok, err)
		}
	})
}

// Keys that can't be read again are accepted for half a minute.
func TestKeysOutliveARestartOfTheGateway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys := apikeytest.New(t)
		ada := keys.Create(t, &apikey.Record{Name: "ada", Scope: "read"}, time.Now())
		if ok, err := find(t, keys, ada); !ok || err != nil {
			t.Fatalf("%v %v", ok, err)
		}
		keys.Fail(errors.New("the gateway is gone"))
		<-time.After(25 * time.Second)
		if ok, err := find(t, keys, ada); !ok || err != nil {
			t.Errorf("after 25 s: %v %v", ok, err)
		}
		if ok, err := find(t, keys, "rk-unknown"); ok || !errors.Is(err, apikey.ErrUnknown) {
			t.Errorf("an unknown key: %v %v", ok, err)
		}
		<-time.After(10 * time.Second)
		if ok, err := find(t, keys, ada); ok || !errors.Is(err, apikey.ErrUnknown) {
			t.Errorf("after more than 30 s: %v %v", ok, err)
		}
		keys.Fail(nil)
		if ok, err := find(t, keys, ada); !ok || err != nil {
			t.Errorf("when the gateway is back: %v %v", ok, err)
		}
	})
}

// The use of a key is reported at most once a minute.
func TestUsesAreReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys := apikeytest.New(t)
		ada := keys.Create(t, &apikey.Record{Name: "ada", Scope: "read"}, time.Now())
		for range 90 {
			if ok, err := find(t, keys, ada); !ok || err != nil {
				t.Fatalf("%v %v", ok, err)
			}
			<-time.After(time.Second)
		}
		used := keys.Used()
		if len(used) != 2 || used[0].GetSha256() != apikey.Hash(ada) || time.Since(used[1].GetTime().AsTime()) > time.Minute {
			t.Errorf("reported %v at %v", used, time.Now())
		}
	})
}

func TestKeysExpire(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		keys := apikeytest.New(t)
		ada := keys.Create(t, &apikey.Record{Name: "ada", Scope: "sample", Expires: timestamppb.New(time.Now().Add(time.Hour))}, time.Now())
		if ok, err := find(t, keys, ada); !ok || err != nil {
			t.Errorf("before: %v %v", ok, err)
		}
		<-time.After(time.Hour)
		if _, err := find(t, keys, ada); !errors.Is(err, apikey.ErrExpired) {
			t.Errorf("after: %v", err)
		}
	})
}

// The file of earlier versions is a list of rollout.key.v1.ApiKey in JSON.
func TestFilesOfKeysAreRead(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../schemas/golden/contracts.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Message string
		JSON    json.RawMessage
	}
	if err := json.Unmarshal(data, &vectors); err != nil {
		t.Fatal(err)
	}
	var keys []json.RawMessage
	for _, v := range vectors {
		if v.Message == "rollout.key.v1.ApiKey" {
			keys = append(keys, v.JSON)
		}
	}
	file, err := json.Marshal(keys)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "keys.json")
	if list, err := apikey.ReadFile(path); list != nil || err != nil {
		t.Errorf("no file: %v %v", list, err)
	}
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := apikey.ReadFile(path)
	if err != nil || len(list) != len(keys) || len(list) < 2 {
		t.Fatalf("records: %v, %v", list, err)
	}
	for i, record := range list {
		want := &apikey.Record{}
		if err := protojson.Unmarshal(keys[i], want); err != nil || !proto.Equal(record, want) {
			t.Errorf("record %v, want %s", record, keys[i])
		}
	}
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := apikey.ReadFile(path); !errors.Is(err, apikey.ErrFile) {
		t.Errorf("a file that others may write: %v", err)
	}
	for _, bad := range []string{"{", `[{"name":"ada"}]`, `[{"name":"ada","scope":"mesh","sha256":"` + apikey.Hash("") + `"}]`} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := apikey.ReadFile(path); !errors.Is(err, apikey.ErrFile) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
