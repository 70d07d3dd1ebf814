package scripted

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Tokens arrive at the pace of the prompt, and each has its time.
func TestSampleKeepsThePace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pace := Pace(Prompt(20 * time.Millisecond))
		began := time.Now()
		err := Sample(t.Context(), pace, 5, nil, func(i int, text string) error {
			if due := time.Duration(i+1) * 20 * time.Millisecond; time.Since(began) != due {
				t.Errorf("token %d after %v, want %v", i, time.Since(began), due)
			}
			if len(text) != Width {
				t.Errorf("token %q has %d bytes, want %d", text, len(text), Width)
			}
			<-time.After(3 * time.Millisecond)
			if age, err := Age([]byte(text+Token()), time.Now()); age != 3*time.Millisecond || err != nil {
				t.Errorf("the token is %v old, %v; want 3 ms", age, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestAbortsAreRecorded(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "aborts")
	aborts, err := OpenAborts(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err = Sample(ctx, time.Millisecond, 1<<30, aborts, func(i int, _ string) error {
		if i == 2 {
			cancel()
		}
		return nil
	})
	text, readErr := os.ReadFile(path)
	if err == nil || readErr != nil || strings.Count(string(text), "\n") != 1 {
		t.Errorf("%v, %v: %q", err, readErr, text)
	}
	if _, err := Age([]byte("short"), time.Now()); err == nil {
		t.Error("a text without a time is accepted")
	}
}
