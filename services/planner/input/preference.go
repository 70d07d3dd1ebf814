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

// preferenceCheck checks the preference of each row.
type preferenceCheck struct {
	*reporter
	Preference

	desirable uint64 // rows whose label is true
	ties, tie uint64 // pairs of equal completions, and the first one, from 1
}

func (p *preferenceCheck) row(line []byte, fields map[string]json.RawMessage) {
	if p.otherKind(line, fields) {
		return
	}
	switch {
	case p.Chosen != "":
		chosen, ok := p.completion(line, fields, p.Chosen, "chosen_field")
		rejected, also := p.completion(line, fields, p.Rejected, "rejected_field")
		if ok && also && chosen == rejected {
			if p.ties++; p.ties == 1 {
				p.tie = p.number
			}
		}
		if p.Margin != "" {
			p.margin(line, fields)
		}
	case p.Completion != "":
		p.completion(line, fields, p.Completion, "completion_field")
		p.label(line, fields)
	}
}

// otherKind reports, once per file, rows of the other kind: pairs instead of labels, or labels
// instead of pairs.
func (p *preferenceCheck) otherKind(line []byte, fields map[string]json.RawMessage) bool {
	kind := "pair of completions"
	has := func(name string) bool { _, ok := fields[name]; return name != "" && ok }
	wanted := [2]string{p.Completion, p.Label}
	if p.Chosen != "" {
		wanted, kind = [2]string{p.Chosen, p.Rejected}, "completion with a label"
	}
	if !has(p.Others[0]) || !has(p.Others[1]) || has(wanted[0]) || has(wanted[1]) {
		return false
	}
	if p.shown["other kind"]++; p.shown["other kind"] == 1 {
		p.report(line, -1, "", fmt.Sprintf("the row is a %s (`%s`, `%s`), but [algorithm.%s] needs `%s` and `%s`", kind, p.Others[0], p.Others[1],
			p.Algorithm, wanted[0], wanted[1]), p.OthersFix)
	}
	return true
}

func (p *preferenceCheck) completion(line []byte, fields map[string]json.RawMessage, field, key string) (string, bool) {
	raw, ok := fields[field]
	if !ok {
		p.lacks(line, fields, field, "data."+key, key)
		return "", false
	}
	return p.trained(line, raw, field, "completion", p.Algorithm)
}

func (p *preferenceCheck) margin(line []byte, fields map[string]json.RawMessage) {
	field := p.Margin
	raw, ok := fields[field]
	if !ok {
		p.lacks(line, fields, field, "data.margin_field", "margin_field")
		return
	}
	var number float64
	if raw[0] == 'n' || json.Unmarshal(raw, &number) != nil {
		p.badField("margin type", line, field, fmt.Sprintf("`%s` is %s, not a number", field, jsonKind(raw)), "write by how much the chosen completion is better, such as 0.5")
		return
	}
	if number < 0 {
		p.badField("margin below 0", line, field, fmt.Sprintf("`%s` is %s, but a margin must be at least 0", field, raw),
			fmt.Sprintf("swap `%s` and `%s`, or write 0 or more", p.Chosen, p.Rejected))
	}
}

func (p *preferenceCheck) label(line []byte, fields map[string]json.RawMessage) {
	field := p.Label
	raw, ok := fields[field]
	if !ok {
		p.lacks(line, fields, field, "data.label_field", "label_field")
		return
	}
	if text := string(raw); text != "true" && text != "false" {
		p.badField("label type", line, field, fmt.Sprintf("`%s` is %.20s, not true or false", field, text), "write true for a desirable completion, false for an undesirable one"+inTable(p.table))
	} else if text == "true" {
		p.desirable++
	}
}

// inTable says how a CSV file writes a label.
func inTable(table string) string {
	if table == "" {
		return ""
	}
	return "; a CSV file may also have 1 and 0"
}
