// Package scripted is a policy that samples at a fixed pace, for measurements of what stands
// between it and a client. The text of each token is the time at which it was sent.
package scripted

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A stamp is a time in units of 100 ns, modulo 2^40: 30 hours.
const (
	unit   = 100 * time.Nanosecond
	modulo = 1 << 40
	digits = 8 // of base 36 that a stamp has
)

// Width is the number of bytes of a token.
const Width = 1 + digits

func stamp(now time.Time) int64 { return now.UnixNano() / int64(unit) % modulo }

// Token is the text of a token that is sent now.
func Token() string {
	text := strconv.FormatInt(stamp(time.Now()), 36)
	return " " + strings.Repeat("0", digits-len(text)) + text
}

// Age returns how long before now a token was sent. text may have further tokens after it.
func Age(text []byte, now time.Time) (time.Duration, error) {
	if len(text) < Width {
		return 0, fmt.Errorf("token %q: expected a space and %d digits", text, digits)
	}
	sent, err := strconv.ParseInt(string(text[1:Width]), 36, 64)
	if err != nil {
		return 0, fmt.Errorf("token %q: %w", text, err)
	}
	return time.Duration((stamp(now)-sent+modulo)%modulo) * unit, nil
}

const paceMark = "one token every "

// Prompt is a message whose answer is sampled at a pace. It has about a hundred tokens.
func Prompt(pace time.Duration) string {
	return strings.Repeat("Numbers in words: ten, eleven, twelve. ", 10) + paceMark + pace.String()
}

// Pace returns the pace that a message asks for; 0: all tokens at once.
func Pace(message string) time.Duration {
	_, asked, _ := strings.Cut(message, paceMark)
	pace, _ := time.ParseDuration(asked)
	return pace
}

// Sample calls send for each token when it is due: the first after one pace, as if the prompt took
// that long. It records when ctx ends.
func Sample(ctx context.Context, pace time.Duration, tokens int, aborts *Aborts, send func(i int, text string) error) error {
	due := time.Now()
	timer := time.NewTimer(pace)
	defer timer.Stop()
	for i := range tokens {
		due = due.Add(pace)
		timer.Reset(time.Until(due))
		select {
		case <-timer.C:
		case <-ctx.Done():
			aborts.add(time.Now())
			return ctx.Err()
		}
		if err := send(i, Token()); err != nil {
			return err
		}
	}
	return nil
}

// Aborts is a file of the times at which requests were aborted, one per line in nanoseconds since
// 1970. Nil records nothing.
type Aborts struct {
	mu   sync.Mutex
	file *os.File
}

// OpenAborts creates the file; "": nothing is recorded.
func OpenAborts(path string) (*Aborts, error) {
	if path == "" {
		return nil, nil
	}
	file, err := os.Create(path)
	if err != nil {
		return nil, fmt.Errorf("create the file of aborts: %w", err)
	}
	return &Aborts{file: file}, nil
}

func (a *Aborts) add(at time.Time) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	_, _ = fmt.Fprintln(a.file, at.UnixNano())
}
