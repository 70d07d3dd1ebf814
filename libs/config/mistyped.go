package config

import (
	"fmt"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// articles maps the types of TOML values to their names with an article.
var articles = map[string]string{
	"integer": "an integer", "array": "an array", "inline table": "a table", "string": "a string", "boolean": "a boolean", "float": "a float",
	"local date": "a date", "local time": "a time", "local datetime": "a time", "datetime": "a time",
}

// mistyped rewrites the decoder's error about the type of a value with the names of TOML instead of
// Go. Other texts stay.
func mistyped(name, text string) string {
	_, rest, decoding := strings.Cut(text, "cannot decode TOML ")
	found, _, _ := strings.Cut(rest, " into ")
	if strings.Contains(text, "array table") {
		decoding, found = true, "array"
	}
	if !decoding {
		return text
	}
	if words := articles[found]; words != "" {
		found = words
	}
	wanted, fix := expected(name)
	return fmt.Sprintf("expected %s, got %s; write %s", wanted, found, fix)
}

// expected is the type of a key's value, and what to write.
func expected(name string) (wanted, fix string) {
	last := name[strings.LastIndex(name, ".")+1:]
	for _, k := range keys {
		if k.name != name {
			continue
		}
		switch k.field(&Config{}).(type) {
		case *bool:
			return "a boolean", "`" + last + " = true` or `" + last + " = false`, without quotes"
		case *int:
			return "an integer", "`" + last + " = 1`, without quotes"
		case *[]string:
			return "an array of strings", "`" + last + " = [\"..\"]`"
		case *time.Duration:
			return "a duration in a string", "`" + last + " = \"15s\"`"
		case *Ref:
			return "a string that says where the secret is", "`" + last + " = \"file:PATH\"` or `" + last + " = \"env:NAME\"`"
		}
		return "a string", "`" + last + " = \"..\"`"
	}
	return "a table", "its keys below a line `[" + name + "]`"
}

// number returns the key of a secret whose value is not a string, because the decoder does not
// report which key it refused.
func number(data []byte) string {
	var tables map[string]any
	if err := toml.Unmarshal(data, &tables); err != nil {
		return ""
	}
	for _, k := range keys {
		if _, secret := k.field(&Config{}).(*Ref); !secret {
			continue
		}
		table, last, _ := strings.Cut(k.name, ".")
		values, _ := tables[table].(map[string]any)
		switch values[last].(type) {
		case nil, string, map[string]any, []any:
		default:
			return k.name
		}
	}
	return ""
}
