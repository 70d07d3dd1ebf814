package paging_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/paging"
	"github.com/rollout-rl/rollout/libs/rpcerr"
)

func TestNumber(t *testing.T) {
	t.Parallel()
	for token, want := range map[string]uint64{"": 0, "1": 1, "9223372036854775807": 1<<63 - 1} {
		if n, err := paging.Number(token); err != nil || n != want {
			t.Errorf("%q is %d, %v", token, n, err)
		}
	}
	for _, token := range []string{"0", "-1", "01", "+1", "1 ", "next", "9223372036854775808"} {
		_, err := paging.Number(token)
		e, _ := rpcerr.From(err)
		if rpcerr.Code(err) != codes.InvalidArgument || rpcerr.Reason(err) != paging.ReasonToken || len(e.Violations()) != 1 || e.Violations()[0].Path != "page_token" {
			t.Errorf("%q: %v", token, err)
		}
	}
}

// A page ends with the row that its token names, whether that row still exists or not.
func TestPages(t *testing.T) {
	t.Parallel()
	rows := []int{2, 3, 5, 7, 11}
	var got [][]int
	err := paging.All(func(token string) (string, error) {
		after, err := paging.Number(token)
		if err != nil {
			return "", err
		}
		page, next := paging.After(rows, func(n int) bool { return uint64(n) <= after }, 2, strconv.Itoa)
		got = append(got, slices.Clone(page))
		rows = slices.DeleteFunc(slices.Clone(rows), func(n int) bool { return n == 3 })
		return next, nil
	})
	if want := "[[2 3] [5 7] [11]]"; err != nil || fmt.Sprint(got) != want {
		t.Errorf("%v, %v", got, err)
	}
	if page, next := paging.Cut([]int{2, 3}, 2, strconv.Itoa); len(page) != 2 || next != "" {
		t.Errorf("a full last page: %v %q", page, next)
	}
}

func TestAllEndsWithAnError(t *testing.T) {
	t.Parallel()
	broken, calls := errors.New("broken"), 0
	if err := paging.All(func(string) (string, error) { calls++; return "more", broken }); !errors.Is(err, broken) || calls != 1 {
		t.Errorf("%v after %d calls", err, calls)
	}
	if err := paging.All(func(string) (string, error) { calls++; return "same", nil }); err == nil || calls != 3 {
		t.Errorf("a token that repeats: %v after %d calls", err, calls)
	}
}

func TestSomeStopsAtTheLimit(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		limit, sizes string
		more         bool
	}{{"0", "[3 3 3]", false}, {"2", "[2]", true}, {"3", "[3]", true}, {"5", "[3 2]", true}, {"7", "[3 3 1]", false}, {"9", "[3 3 3]", false}} {
		limit, _ := strconv.Atoi(c.limit)
		var sizes []int
		at := 0
		more, err := paging.Some(limit, 3, func(size int, _ string) (int, string, error) {
			sizes = append(sizes, size)
			rows := min(size, 7-at)
			if at += rows; at == 7 {
				return rows, "", nil
			}
			return rows, strconv.Itoa(at), nil
		})
		if err != nil || more != c.more || fmt.Sprint(sizes) != c.sizes {
			t.Errorf("limit %s: %v, more %v, %v", c.limit, sizes, more, err)
		}
	}
}
