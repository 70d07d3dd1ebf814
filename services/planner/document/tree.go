package document

import "strings"

// Kind is the type of a TOML value.
type Kind int

// The types. No key takes a date or time, so they share one.
const (
	Table Kind = iota
	Array
	String
	Integer
	Float
	Bool
	DateTime
)

// String names the kind with its article, as in "expected an integer, got a string".
func (k Kind) String() string {
	return [...]string{"a table", "an array", "a string", "an integer", "a float", "a boolean", "a date or time"}[k]
}

// Value is one value, or one table.
type Value struct {
	Kind Kind
	Span Span // a table's header or the key that made it; the root: the whole text

	Entries []*Entry // of a table, in the order of the text
	Items   []*Value // of an array

	String  string
	Integer int64
	Float   float64
	Bool    bool

	header bool // made by a `[header]`: a second one is a duplicate
	inline bool // `{...}`: complete where it stands
}

// Entry is a key and its value.
type Entry struct {
	Key   string
	Span  Span // the key
	Value *Value
	// Bare reports that the value was given on a command line without quotes and was read as a string.
	Bare bool
}

// Get returns the entry of a key in a table; nil without one.
func (v *Value) Get(key string) *Entry {
	for _, e := range v.Entries {
		if e.Key == key {
			return e
		}
	}
	return nil
}

// Find follows a dotted path of keys from v; nil if a key is absent.
func (v *Value) Find(path string) *Entry {
	var e *Entry
	for key := range strings.SplitSeq(path, ".") {
		if v == nil || v.Kind != Table {
			return nil
		}
		if e = v.Get(key); e == nil {
			return nil
		}
		v = e.Value
	}
	return e
}

func (v *Value) add(key string, span Span, value *Value) *Entry {
	e := &Entry{Key: key, Span: span, Value: value}
	v.Entries = append(v.Entries, e)
	return e
}

// Fault is a mistake in the text.
type Fault struct {
	Span    Span
	Message string
	Fix     string
	// Duplicate reports that the text is well formed and sets a key twice.
	Duplicate bool
}
