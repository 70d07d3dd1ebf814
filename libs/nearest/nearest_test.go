package nearest

import "testing"

func TestNearest(t *testing.T) {
	t.Parallel()
	keys := []string{"group_size", "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop"}
	for name, want := range map[string]string{
		"grp_size": "group_size", "groupsize": "group_size", "GROUP_SIZE": "group_size", "temprature": "temperature", "temp": "temperature",
		"topp": "top_p", "tpo_k": "top_k", "stops": "stop", "frobnicate": "", "x": "", "": "",
	} {
		if got := To(name, keys); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
	if d := distance("ca", "abc"); d != 3 {
		t.Errorf("distance(ca, abc) = %d", d)
	}
}
