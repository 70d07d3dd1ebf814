package edge

import (
	"encoding/json"
	"strings"

	inferencev1 "github.com/rollout-rl/rollout/proto/gen/rollout/inference/v1"
)

// Structured is what a completion must match, with the names of OpenAI and vLLM.
type Structured struct {
	ResponseFormat    *ResponseFormat    `json:"response_format"`
	StructuredOutputs *structuredOutputs `json:"structured_outputs"`
	GuidedJSON        json.RawMessage    `json:"guided_json"`
	GuidedRegex       string             `json:"guided_regex"`
	GuidedChoice      []string           `json:"guided_choice"`
	GuidedGrammar     string             `json:"guided_grammar"`
}

// ResponseFormat is the format of a text.
type ResponseFormat struct {
	Type       string      `json:"type"`
	JSONSchema *jsonSchema `json:"json_schema"`
}

type jsonSchema struct {
	Schema json.RawMessage `json:"schema"`
}

// Format returns a format; the schema is of the type json_schema.
func Format(kind string, schema json.RawMessage) *ResponseFormat {
	return &ResponseFormat{Type: kind, JSONSchema: &jsonSchema{schema}}
}

type structuredOutputs struct {
	JSON          json.RawMessage `json:"json"`
	Regex         string          `json:"regex"`
	Choice        []string        `json:"choice"`
	Grammar       string          `json:"grammar"`
	JSONObject    bool            `json:"json_object"`
	StructuralTag json.RawMessage `json:"structural_tag"`
}

// Constraint returns the one constraint of a request; nil: none.
func (s *Structured) Constraint() (*inferencev1.Constraint, error) {
	found := constraints{}
	found.schema("guided_json", s.GuidedJSON)
	found.regex("guided_regex", s.GuidedRegex)
	found.choices("guided_choice", s.GuidedChoice)
	found.grammar("guided_grammar", s.GuidedGrammar)
	if o := s.StructuredOutputs; o != nil {
		if IsSet(o.StructuralTag) {
			return nil, Unsupported("structural_tag", "send `json`, `regex`, `choice`, or `grammar`")
		}
		found.schema("structured_outputs", o.JSON)
		found.regex("structured_outputs", o.Regex)
		found.choices("structured_outputs", o.Choice)
		found.grammar("structured_outputs", o.Grammar)
		if o.JSONObject {
			found.object("structured_outputs")
		}
	}
	if f := s.ResponseFormat; f != nil {
		switch f.Type {
		case "", "text":
		case "json_object":
			found.object("response_format")
		case "json_schema":
			if f.JSONSchema == nil || len(f.JSONSchema.Schema) == 0 {
				return nil, Missing("response_format", "`response_format.json_schema.schema` is missing")
			}
			found.schema("response_format", f.JSONSchema.Schema)
		default:
			return nil, Invalid("response_format", "`response_format.type` must be text, json_object, or json_schema, got %q", f.Type)
		}
	}
	return found.one()
}

// constraints collects what a request names.
type constraints struct {
	list   []*inferencev1.Constraint
	params []string
	err    error
}

func (c *constraints) add(param string, found *inferencev1.Constraint) {
	c.list, c.params = append(c.list, found), append(c.params, param)
}

// schema adds a JSON schema, which vLLM's clients may send as a string.
func (c *constraints) schema(param string, raw json.RawMessage) {
	if len(raw) == 0 || string(raw) == "null" {
		return
	}
	var text string
	if json.Unmarshal(raw, &text) != nil {
		text = string(raw)
	}
	text = strings.TrimSpace(text)
	if !json.Valid([]byte(text)) || text[0] != '{' && text != "true" && text != "false" {
		c.err = Invalid(param, "`%s` must have a JSON schema", param)
		return
	}
	c.add(param, &inferencev1.Constraint{Kind: &inferencev1.Constraint_JsonSchema{JsonSchema: text}})
}

func (c *constraints) object(param string) {
	c.add(param, &inferencev1.Constraint{Kind: &inferencev1.Constraint_JsonObject{JsonObject: true}})
}

func (c *constraints) regex(param, pattern string) {
	if pattern != "" {
		c.add(param, &inferencev1.Constraint{Kind: &inferencev1.Constraint_Regex{Regex: pattern}})
	}
}

func (c *constraints) grammar(param, grammar string) {
	if grammar != "" {
		c.add(param, &inferencev1.Constraint{Kind: &inferencev1.Constraint_Grammar{Grammar: grammar}})
	}
}

func (c *constraints) choices(param string, texts []string) {
	switch {
	case len(texts) > maxChoices:
		c.err = Invalid(param, "`%s` must have at most %d choices, got %d", param, maxChoices, len(texts))
	case len(texts) > 0:
		c.add(param, &inferencev1.Constraint{Kind: &inferencev1.Constraint_Choices{Choices: &inferencev1.Choices{Texts: texts}}})
	}
}

func (c *constraints) one() (*inferencev1.Constraint, error) {
	if c.err != nil {
		return nil, c.err
	}
	switch len(c.list) {
	case 0:
		return nil, nil
	case 1:
		return c.list[0], nil
	}
	return nil, Invalid(c.params[1], "`%s` and `%s` both constrain the text; send one constraint", c.params[0], c.params[1])
}
