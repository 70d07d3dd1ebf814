package input

import (
	"encoding/json"
	"fmt"
)

// Preference has the fields of preference data: a pair, or one completion with a label. The zero
// value is that of a dataset without preferences.
type Preference struct {
	Chosen, Rejected  string // fields of a pair
	Margin            string // field of the margin; "" without margins
	Completion, Label string // fields of a labelled completion
	Algorithm         string // that needs them
	// Others are the two fields of the other kind of preference, and OthersFix is the suggestion for
	// such rows.
	Others    [2]string
	OthersFix string
}

func (p Preference) completions() []string {
	switch {
	case p.Chosen != "":
		return []string{p.Chosen, p.Rejected}
	case p.Completion != "":
		return []string{p.Completion}
	}
	return nil
}

// preference checks the preference of a row.
func (d *Dataset) preference(line []byte, fields map[string]json.RawMessage) {
	p := d.Preference
	if d.otherKind(line, fields) {
		return
	}
	switch {
	case p.Chosen != "":
		chosen, ok := d.completion(line, fields, p.Chosen, "chosen_field")
		rejected, also := d.completion(line, fields, p.Rejected, "rejected_field")
		if ok && also && chosen == rejected {
			d.badField("same", line, p.Rejected, fmt.Sprintf("`%s` and `%s` are equal, so the pair has no preference", p.Chosen, p.Rejected), "remove the row")
		}
		if p.Margin != "" {
			d.margin(line, fields)
		}
	case p.Completion != "":
		d.completion(line, fields, p.Completion, "completion_field")
		d.label(line, fields)
	}
}

// otherKind reports, once per file, rows of the other kind: pairs instead of labels, or labels
// instead of pairs.
func (d *Dataset) otherKind(line []byte, fields map[string]json.RawMessage) bool {
	p, kind := d.Preference, "pair of completions"
	has := func(name string) bool { _, ok := fields[name]; return name != "" && ok }
	wanted := [2]string{p.Completion, p.Label}
	if p.Chosen != "" {
		wanted, kind = [2]string{p.Chosen, p.Rejected}, "completion with a label"
	}
	if !has(p.Others[0]) || !has(p.Others[1]) || has(wanted[0]) || has(wanted[1]) {
		return false
	}
	if d.shown["other kind"]++; d.shown["other kind"] == 1 {
		d.report(line, -1, "", fmt.Sprintf("the row is a %s (`%s`, `%s`), but [algorithm.%s] needs `%s` and `%s`", kind, p.Others[0], p.Others[1],
			p.Algorithm, wanted[0], wanted[1]), p.OthersFix)
	}
	return true
}

func (d *Dataset) completion(line []byte, fields map[string]json.RawMessage, field, key string) (string, bool) {
	raw, ok := fields[field]
	if !ok {
		d.lacks(line, fields, field, "data."+key, key)
		return "", false
	}
	return d.trained(line, raw, field, "completion", d.Preference.Algorithm)
}

func (d *Dataset) margin(line []byte, fields map[string]json.RawMessage) {
	field := d.Preference.Margin
	raw, ok := fields[field]
	if !ok {
		d.lacks(line, fields, field, "data.margin_field", "margin_field")
		return
	}
	var number float64
	if raw[0] == 'n' || json.Unmarshal(raw, &number) != nil {
		d.badField("margin type", line, field, fmt.Sprintf("`%s` is %s, not a number", field, jsonKind(raw)), "write by how much the chosen completion is better, such as 0.5")
		return
	}
	if number < 0 {
		d.badField("margin below 0", line, field, fmt.Sprintf("`%s` is %s, but a margin must be at least 0", field, raw),
			fmt.Sprintf("swap `%s` and `%s`, or write 0 or more", d.Preference.Chosen, d.Preference.Rejected))
	}
}

func (d *Dataset) label(line []byte, fields map[string]json.RawMessage) {
	field := d.Preference.Label
	raw, ok := fields[field]
	if !ok {
		d.lacks(line, fields, field, "data.label_field", "label_field")
		return
	}
	if text := string(raw); text != "true" && text != "false" {
		d.badField("label type", line, field, fmt.Sprintf("`%s` is %.20s, not true or false", field, text), "write true for a desirable completion, false for an undesirable one")
	} else if text == "true" {
		d.Desirable++
	}
}
