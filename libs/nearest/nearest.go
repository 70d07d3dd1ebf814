// Package nearest finds the most similar name for a mistyped one.
package nearest

import "strings"

// To returns the candidate that is most similar to name, or "" if none is similar enough: at most a
// third of the letters may differ, or one may be a prefix of the other.
func To(name string, candidates []string) string {
	best, bestDistance := "", len(name)/3+2
	lower := strings.ToLower(name)
	for _, candidate := range candidates {
		limit, far := max(1, max(len(name), len(candidate))/3), distance(lower, strings.ToLower(candidate))
		if far <= min(limit, bestDistance-1) {
			best, bestDistance = candidate, far
		}
	}
	if best != "" || len(name) < 4 {
		return best
	}
	for _, candidate := range candidates {
		if whole := strings.ToLower(candidate); strings.HasPrefix(whole, lower) || len(whole) > 3 && strings.HasPrefix(lower, whole+"_") {
			return candidate
		}
	}
	return ""
}

// Of is To for a closed list of candidates: half of the letters may differ.
func Of(name string, candidates []string) string {
	if near := To(name, candidates); near != "" {
		return near
	}
	for _, candidate := range candidates {
		if distance(strings.ToLower(name), candidate) <= len(candidate)/2 {
			return candidate
		}
	}
	return ""
}

// distance is the optimal string alignment distance: insertions, deletions, substitutions and swaps
// of neighbours.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
