// Package output formats the output of commands: styled text and tables, or JSON.
package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// marshal uses proto field names and removes white space, which protojson varies on purpose.
func marshal(m proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("write %s as JSON: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, raw); err != nil {
		return nil, err
	}
	return compact.Bytes(), nil
}

// Document writes one message as an indented JSON document.
func Document(w io.Writer, m proto.Message) error {
	compact, err := marshal(m)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, compact, "", "  "); err != nil {
		return err
	}
	b.WriteByte('\n')
	_, err = w.Write(b.Bytes())
	return err
}

// Line writes one message as a line of JSON. If kind is not empty, the line is {kind: message}.
func Line(w io.Writer, kind string, m proto.Message) error {
	compact, err := marshal(m)
	if err != nil {
		return err
	}
	if kind != "" {
		compact = fmt.Appendf(nil, "{%q:%s}", kind, compact)
	}
	_, err = w.Write(append(compact, '\n'))
	return err
}

// Value writes a value as an indented JSON document.
func Value(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// ValueLine writes a value as a line of JSON.
func ValueLine(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// Any returns a message as JSON, to be embedded in another document.
func Any(m proto.Message) (any, error) {
	compact, err := marshal(m)
	if err != nil {
		return nil, err
	}
	return json.RawMessage(compact), nil
}
