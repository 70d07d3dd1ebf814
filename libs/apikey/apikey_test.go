package apikey_test

import (
	"errors"
	"os"
	"path/filepath"
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
		t.Error("no scope is a scope")
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
			if keys[i], err = keep.Create(who, apikey.Submit, time.Now()); err != nil {
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
		t.Error("another key went with it")
	}
	_, again := keep.Create("bob", apikey.Read, time.Now())
	_, scope := keep.Create("new", "root", time.Now())
	_, mesh := keep.Create("new", apikey.Mesh, time.Now())
	_, bad := keep.Create("a b", apikey.Read, time.Now())
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
