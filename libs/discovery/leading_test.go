package discovery

import "testing"

func TestLeading(t *testing.T) {
	t.Parallel()
	plain := []Instance{{ID: "a"}, {ID: "b"}}
	if got := leading(plain); !equal(got, plain) {
		t.Errorf("without epochs: %v", got)
	}
	old, newer := Instance{ID: "a", Meta: map[string]string{MetaEpoch: "9"}}, Instance{ID: "b", Meta: map[string]string{MetaEpoch: "10"}}
	if got := leading([]Instance{old, newer, {ID: "c"}}); !equal(got, []Instance{newer}) {
		t.Errorf("with epochs: %v", got)
	}
}
