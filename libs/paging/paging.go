// Package paging has the rules of lists that are returned in pages.
//
// A request has `page_size` and `page_token`, and a response has `next_page_token`, which is empty
// in the last page. A token names the last row of its page, so that rows that are added or deleted
// meanwhile neither repeat nor hide others.
package paging

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"

	"google.golang.org/grpc/codes"

	"github.com/rollout-rl/rollout/libs/rpcerr"
)

// ReasonToken is the reason of errors about page tokens.
const ReasonToken = "PAGE_TOKEN_INVALID"

// ErrToken is the error about a page token that no response had.
func ErrToken(token string) *rpcerr.Error {
	return rpcerr.New(codes.InvalidArgument, ReasonToken, "page_token: %q is not the next_page_token of a page of this list", token).
		Field("page_token", "must be a next_page_token").
		Fix("send the next_page_token of the previous page with an otherwise equal request, or no page_token for the first page")
}

// Size returns the size of a page. The contract limits what a request may ask for.
func Size(requested uint32, byDefault int) int { return cmp.Or(int(requested), byDefault) }

// Number returns the row that a token names by its number; 0 for the first page. ErrToken.
func Number(token string) (uint64, error) {
	if token == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(token, 10, 63) // a signed column has it
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != token {
		return 0, ErrToken(token)
	}
	return n, nil
}

// Cut divides rows, of which one more than a page was read, into the page and the token of the next
// one: that of its last row, or "".
func Cut[T any](rows []T, size int, token func(T) string) ([]T, string) {
	if len(rows) <= size {
		return rows, ""
	}
	return rows[:size], token(rows[size-1])
}

// After returns a page of the rows that follow the one that a token names, in a list that is in
// memory. before reports whether a row precedes the named one, or is it.
func After[T any](rows []T, before func(T) bool, size int, token func(T) string) ([]T, string) {
	for len(rows) > 0 && before(rows[0]) {
		rows = rows[1:]
	}
	return Cut(rows, size, token)
}

// All requests the pages of a list one after the other. page requests the one of a token and
// returns the token of the next.
func All(page func(token string) (next string, err error)) error {
	for token := ""; ; {
		next, err := page(token)
		if err != nil || next == "" {
			return err
		}
		if next == token {
			return fmt.Errorf("the server returned the page token %q twice, so the list would never end", token)
		}
		token = next
	}
}

// Some requests pages until they have limit rows; 0: all of them. page requests one of at
// most size rows. It returns the number of its rows and the token of the next. more reports whether
// the list has further rows.
func Some(limit, largest int, page func(size int, token string) (rows int, next string, err error)) (more bool, err error) {
	full := errors.New("full")
	err = All(func(token string) (string, error) {
		size := largest
		if limit > 0 {
			size = min(limit, largest)
		}
		rows, next, err := page(size, token)
		if limit -= rows; err == nil && limit == 0 && next != "" {
			return "", full
		}
		return next, err
	})
	if errors.Is(err, full) {
		return true, nil
	}
	return false, err
}
