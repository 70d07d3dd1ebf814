package apikey_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rollout-rl/rollout/libs/apikey"
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

func TestKeysComeAndGo(t *testing.T) {
	t.Parallel()
	keep := apikey.Keep{Path: filepath.Join(t.TempDir(), "keys", "api-keys.json")}
	ring := apikey.Open(keep.Path)
	if _, ok, err := ring.Find(""); ok || err != nil {
		t.Errorf("without a file: %v %v", ok, err)
	}
	var wg sync.WaitGroup
	keys := make([]string, 4)
	for i, who := range []string{"ada", "bob", "eve", "ci@example.org"} {
		wg.Go(func() {
			var err error
			if keys[i], err = keep.Create(who, apikey.Submit, apikey.Limits{}, time.Now()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, key := range keys {
		if got, ok, err := ring.Find(key); !ok || err != nil || got.Scope != apikey.Submit {
			t.Errorf("%+v %v %v", got, ok, err)
		}
		if _, ok, _ := ring.Find(key + "x"); ok {
			t.Error("a longer key passes")
		}
	}
	data, err := os.ReadFile(keep.Path)
	if info, _ := os.Stat(keep.Path); err != nil || info.Mode().Perm() != 0o600 || strings.Contains(string(data), keys[0]) {
		t.Errorf("the file: %v %s", err, data)
	}
	if err := keep.Revoke("ada"); err != nil {
		t.Fatal(err)
	}
	if _, ok, _ := ring.Find(keys[0]); ok {
		t.Error("a revoked key passes")
	}
	if _, ok, _ := ring.Find(keys[1]); !ok {
		t.Error("another key was removed too")
	}
	_, again := keep.Create("bob", apikey.Read, apikey.Limits{}, time.Now())
	_, scope := keep.Create("new", "root", apikey.Limits{}, time.Now())
	_, mesh := keep.Create("new", apikey.Mesh, apikey.Limits{}, time.Now())
	_, bad := keep.Create("a b", apikey.Read, apikey.Limits{}, time.Now())
	for want, got := range map[error]error{apikey.ErrExists: again, apikey.ErrMissing: keep.Revoke("ada"), apikey.ErrScope: errors.Join(scope, mesh), apikey.ErrName: bad} {
		if !errors.Is(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	if err := os.Chmod(keep.Path, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := ring.Find(keys[1]); ok || !errors.Is(err, apikey.ErrFile) {
		t.Errorf("a file that others may write: %v %v", ok, err)
	}
}

// The file of keys is a list of rollout.key.v1.ApiKey in JSON; records without a project belong to
// the default project.
func TestRecordsAreApiKeys(t *testing.T) {
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
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := apikey.Keep{Path: path}.List()
	if err != nil || len(list) != 2 || list[0].Project != "" || list[1].Project != "math" {
		t.Fatalf("records: %+v, %v", list, err)
	}
	for i, record := range list {
		data, err := json.Marshal(record)
		if err != nil {
			t.Fatal(err)
		}
		var got, want map[string]any
		if json.Unmarshal(data, &got) != nil || json.Unmarshal(keys[i], &want) != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("record: %s, want %s", data, keys[i])
		}
	}
}
