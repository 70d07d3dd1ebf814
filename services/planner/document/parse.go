package document

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2/unstable"
)

// Parse reads a text. It skips lines that it can't read, so that the other lines are checked too;
// the tree lacks the skipped ones.
func Parse(source *Source) (*Value, []Fault) {
	p := &parser{source: source, root: &Value{Kind: Table, Span: Span{Source: source}}}
	if fault, found := p.source.invalid(); found {
		return p.root, []Fault{fault}
	}
	p.table = p.root
	for start := 0; start < len(source.Data); {
		start = p.expressions(start)
	}
	return p.root, p.faults
}

type parser struct {
	source *Source
	base   int // offset of the syntax parser's text in the source
	syntax unstable.Parser
	root   *Value
	table  *Value // of the last header
	faults []Fault
}

// expressions reads from start to the end or to the first mistake; it returns where to continue.
func (p *parser) expressions(start int) int {
	p.base = start
	p.syntax.Reset(p.source.Data[start:])
	for p.syntax.NextExpression() {
		switch node := p.syntax.Expression(); node.Kind {
		case unstable.Table, unstable.ArrayTable:
			p.header(node)
		case unstable.KeyValue:
			p.keyValue(p.table, node)
		}
	}
	err := p.syntax.Error()
	if err == nil {
		return len(p.source.Data)
	}
	var syntax *unstable.ParserError
	if !errors.As(err, &syntax) {
		p.faults = append(p.faults, Fault{Span: p.source.End(), Message: err.Error()})
		return len(p.source.Data)
	}
	at := p.base + p.offset(syntax.Highlight)
	p.faults = append(p.faults, describe(Span{p.source, at, len(syntax.Highlight)}, syntax.Message))
	next := bytes.IndexByte(p.source.Data[at:], '\n')
	if next < 0 {
		return len(p.source.Data)
	}
	return at + next + 1
}

func (p *parser) offset(highlight []byte) int {
	if offset := cap(p.syntax.Data()) - cap(highlight); offset >= 0 && offset+len(highlight) <= len(p.syntax.Data()) {
		return offset
	}
	return len(p.syntax.Data())
}

func (p *parser) span(r unstable.Range) Span {
	return Span{p.source, p.base + int(r.Offset), int(r.Length)}
}

func (p *parser) header(node *unstable.Node) {
	keys := node.Key()
	table := p.root
	for keys.Next() {
		key := keys.Node()
		span := p.span(key.Raw)
		last := keys.IsLast()
		if last {
			span = p.brackets(span)
		}
		e := table.Get(string(key.Data))
		switch {
		case e == nil:
			e = table.add(string(key.Data), p.span(key.Raw), &Value{Kind: Table, Span: span})
			e.Value.header = last
			if last && node.Kind == unstable.ArrayTable {
				p.fault(span, "a configuration has no arrays of tables", "write one table: ["+string(key.Data)+"]")
			}
		case e.Value.Kind != Table || e.Value.inline || last && e.Value.header:
			p.duplicate(span, "table ["+path(node)+"]", e)
			if e.Value.Kind != Table {
				p.table = &Value{Kind: Table, Span: span} // the keys that follow are read and dropped
				return
			}
		case last:
			e.Value.header = true
			e.Value.Span, e.Span = span, p.span(key.Raw)
		}
		table = e.Value
	}
	p.table = table
}

// brackets widens the span of a header's last key to the whole header.
func (p *parser) brackets(key Span) Span {
	data := p.source.Data
	start := bytes.LastIndexByte(data[:key.Offset+1], '\n') + 1
	start += bytes.IndexByte(data[start:], '[')
	end := key.Offset + key.Length
	for end < len(data) && data[end] != '\n' && (data[end] == ']' || data[end] == ' ' || data[end] == '\t') {
		end++
	}
	end = start + len(bytes.TrimRight(data[start:end], " \t"))
	return Span{p.source, start, end - start}
}

func (p *parser) keyValue(table *Value, node *unstable.Node) {
	keys := node.Key()
	for keys.Next() {
		key := keys.Node()
		name, span := string(key.Data), p.span(key.Raw)
		e := table.Get(name)
		if keys.IsLast() {
			value := p.value(node.Value(), p.valueStart(span))
			if e != nil {
				p.duplicate(span, "key `"+name+"`", e)
				return
			}
			table.add(name, span, value)
			return
		}
		if e == nil {
			e = table.add(name, span, &Value{Kind: Table, Span: span})
		}
		if e.Value.Kind != Table || e.Value.inline {
			p.duplicate(span, "key `"+name+"`", e)
			return
		}
		table = e.Value
	}
}

// valueStart is the offset after the `=` of a key.
func (p *parser) valueStart(key Span) int {
	data := p.source.Data
	at := key.Offset + key.Length
	at += bytes.IndexByte(data[at:], '=') + 1
	for at < len(data) && (data[at] == ' ' || data[at] == '\t') {
		at++
	}
	return at
}

// value reads one value; start is its offset, which the syntax tree does not have for arrays.
func (p *parser) value(node *unstable.Node, start int) *Value {
	v := &Value{Span: p.span(node.Raw)}
	text := strings.ReplaceAll(string(node.Data), "_", "")
	switch node.Kind {
	case unstable.String:
		v.Kind, v.String = String, string(node.Data)
	case unstable.Bool:
		v.Kind, v.Bool = Bool, text == "true"
	case unstable.Integer:
		v.Kind = Integer
		n, err := strconv.ParseInt(text, 0, 64)
		if err != nil {
			n = math.MaxInt64
			if strings.HasPrefix(text, "-") {
				n = math.MinInt64
			}
		}
		v.Integer = n
	case unstable.Float:
		v.Kind = Float
		v.Float, _ = strconv.ParseFloat(text, 64) // infinite if too large; the rules reject it
	case unstable.Array:
		v.Kind, v.Span = Array, Span{p.source, start, 1}
		items := node.Children()
		for items.Next() {
			v.Items = append(v.Items, p.value(items.Node(), start))
		}
		v.Span.Length = p.closing(start) - start
	case unstable.InlineTable:
		v.Kind, v.inline = Table, true
		entries := node.Children()
		for entries.Next() {
			if entries.Node().Kind == unstable.KeyValue {
				p.keyValue(v, entries.Node())
			}
		}
	default:
		v.Kind = DateTime
	}
	return v
}

// closing is the offset after the part of an array on its first line.
func (p *parser) closing(start int) int {
	line, _, _ := bytes.Cut(p.source.Data[start:], []byte("\n"))
	if end := bytes.LastIndexByte(line, ']'); end >= 0 {
		return start + end + 1
	}
	return start + len(bytes.TrimRight(line, " \t\r"))
}

func (p *parser) fault(span Span, message, fix string) {
	p.faults = append(p.faults, Fault{Span: span, Message: message, Fix: fix})
}

func (p *parser) duplicate(span Span, what string, first *Entry) {
	line, _ := first.Span.Position()
	p.faults = append(p.faults, Fault{
		Span: span, Message: fmt.Sprintf("%s is set twice, first on line %d", what, line), Fix: "remove one of the two", Duplicate: true,
	})
}

func path(node *unstable.Node) string {
	var parts []string
	keys := node.Key()
	for keys.Next() {
		parts = append(parts, string(keys.Node().Data))
	}
	return strings.Join(parts, ".")
}
