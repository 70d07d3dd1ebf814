package edge

import (
	"encoding/json"
	"html/template"
	"maps"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// about describes the fields whose meaning their dialect does not define.
var about = map[string]string{
	"model":                      "Name of the policy, or the id of its run; GET /v1/models lists them.",
	"session_id":                 "Session that the request continues; absent: a new one.",
	"weights_version":            "Weights version to sample with; 409 with the versions that workers hold if none holds it.",
	"min_weights_version":        "Oldest weights version to sample with. The request waits for it.",
	"min_weight_version":         "The same as min_weights_version.",
	"return_token_ids":           "Whether the response has prompt_token_ids, token_ids, and token_logprobs.",
	"return_tokens_as_token_ids": "Whether the tokens of logprobs are written as token_id:ID.",
	"chat_template_kwargs":       "Further variables of the chat template.",
	"continue_final_message":     "Whether the completion continues the last message, which is the assistant's.",
	"prompt_logprobs":            "Number of most likely tokens to report at each position of the prompt, 0 to 20.",
	"structured_outputs":         "What the text must match: json, regex, choice, grammar, or json_object.",
}

// Docs are the routes of the OpenAPI document of the other routes, and of a page that shows it.
func (e *Edge) Docs(routes []Route) []Route {
	document := openAPI(routes)
	page := func(w http.ResponseWriter, _ *http.Request) error {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
		return docsPage.Execute(w, document)
	}
	return []Route{
		{Method: http.MethodGet, Path: "/docs", About: "This page.", Body: PlainBody, Open: true, Serve: page},
		{Method: http.MethodGet, Path: "/openapi.json", About: "OpenAPI document.", Body: PlainBody, Open: true, Serve: func(w http.ResponseWriter, _ *http.Request) error {
			return WriteJSON(w, http.StatusOK, document)
		}},
	}
}

// api is an OpenAPI document.
type api struct {
	OpenAPI    string                          `json:"openapi"`
	Info       map[string]string               `json:"info"`
	Paths      map[string]map[string]operation `json:"paths"`
	Components map[string]any                  `json:"components"`
	Security   []map[string][]string           `json:"security"`
}

type operation struct {
	Summary     string         `json:"summary"`
	OperationID string         `json:"operationId"`
	Tags        []string       `json:"tags"`
	Parameters  []parameter    `json:"parameters,omitempty"`
	RequestBody map[string]any `json:"requestBody,omitempty"`
	Responses   map[string]any `json:"responses"`
	Fields      *schema        `json:"-"`
}

type parameter struct {
	Name        string  `json:"name"`
	In          string  `json:"in"`
	Description string  `json:"description,omitempty"`
	Required    bool    `json:"required,omitempty"`
	Schema      *schema `json:"schema"`
}

// schema is a JSON schema. The empty one allows any value.
type schema struct {
	Type                 string             `json:"type,omitempty"`
	Description          string             `json:"description,omitempty"`
	Properties           map[string]*schema `json:"properties,omitempty"`
	Required             []string           `json:"required,omitempty"`
	Items                *schema            `json:"items,omitempty"`
	AdditionalProperties *schema            `json:"additionalProperties,omitempty"`
}

// named is a variable of a path.
var named = regexp.MustCompile(`\{([a-z]+)(\.\.\.)?\}`)

func openAPI(routes []Route) *api {
	doc := &api{
		OpenAPI: "3.1.0", Info: map[string]string{"title": "rollout gateway", "version": "1"}, Paths: map[string]map[string]operation{},
		Components: map[string]any{"securitySchemes": map[string]any{
			"bearer": map[string]string{"type": "http", "scheme": "bearer"},
			"key":    map[string]string{"type": "apiKey", "in": "header", "name": "x-api-key"},
		}},
		Security: []map[string][]string{{"bearer": {}}, {"key": {}}},
	}
	for _, route := range routes {
		path := named.ReplaceAllString(route.Path, "{$1}")
		doc.add(path, route)
		if route.Session {
			doc.add("/sessions/{session}"+path, route)
		}
	}
	return doc
}

func (d *api) add(path string, route Route) {
	failure := map[string]any{"description": "An error in the shape of the dialect, with our `reason` and `fix` inside."}
	op := operation{
		Summary: route.About, Tags: []string{route.Tag}, Responses: map[string]any{"200": map[string]any{"description": "Success."}, "4XX": failure},
		OperationID: strings.ToLower(route.Method) + strings.Map(func(c rune) rune {
			if strings.ContainsRune("/{}", c) {
				return '_'
			}
			return c
		}, path),
	}
	for _, variable := range named.FindAllStringSubmatch(path, -1) {
		op.Parameters = append(op.Parameters, parameter{Name: variable[1], In: "path", Required: true, Schema: &schema{Type: "string"}})
	}
	if route.Request != nil {
		op.Fields = schemaOf(reflect.TypeOf(route.Request))
		op.Fields.Required = route.Required
		op.RequestBody = map[string]any{"required": true, "content": map[string]any{"application/json": map[string]any{"schema": op.Fields}}}
	}
	if route.Session && route.Request != nil {
		for _, header := range []parameter{
			{Name: "X-Session-ID", Description: about["session_id"], Schema: &schema{Type: "string"}},
			{Name: "x-rollout-weights-version", Description: about["weights_version"], Schema: &schema{Type: "integer"}},
			{Name: "x-rollout-min-weights-version", Description: about["min_weights_version"], Schema: &schema{Type: "integer"}},
		} {
			header.In = "header"
			op.Parameters = append(op.Parameters, header)
		}
	}
	if d.Paths[path] == nil {
		d.Paths[path] = map[string]operation{}
	}
	d.Paths[path][strings.ToLower(route.Method)] = op
}

// schemaOf returns the schema of the JSON that a type decodes.
func schemaOf(t reflect.Type) *schema {
	switch {
	case t == reflect.TypeFor[json.RawMessage]():
		return &schema{}
	case t == reflect.TypeFor[Integer]():
		return &schema{Type: "integer"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return schemaOf(t.Elem())
	case reflect.Struct:
		out := &schema{Type: "object", Properties: map[string]*schema{}}
		for _, field := range reflect.VisibleFields(t) {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			if field.Anonymous || name == "" || name == "-" {
				continue
			}
			of := *schemaOf(field.Type)
			of.Description = about[name]
			out.Properties[name] = &of
		}
		return out
	case reflect.Slice:
		return &schema{Type: "array", Items: schemaOf(t.Elem())}
	case reflect.Map:
		return &schema{Type: "object", AdditionalProperties: schemaOf(t.Elem())}
	case reflect.String:
		return &schema{Type: "string"}
	case reflect.Bool:
		return &schema{Type: "boolean"}
	case reflect.Float64, reflect.Float32:
		return &schema{Type: "number"}
	}
	return &schema{Type: "integer"}
}

// docsPage shows the document without scripts, fonts, or other files.
var docsPage = template.Must(template.New("docs").Funcs(template.FuncMap{
	"upper": strings.ToUpper, "session": func(path string) bool { return strings.HasPrefix(path, "/sessions/{session}/") },
	"sorted":   func(properties map[string]*schema) []string { return slices.Sorted(maps.Keys(properties)) },
	"required": slices.Contains[[]string],
	"kind": func(s *schema) string {
		switch {
		case s.Type == "array" && s.Items.Type != "":
			return "array of " + s.Items.Type
		case s.Type == "":
			return "any"
		}
		return s.Type
	},
}).Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>rollout gateway</title>
<style>
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c;background:#fff}
code{font:14px ui-monospace,monospace}summary{cursor:pointer;padding:.4rem 0}table{border-collapse:collapse;margin:.5rem 0 1rem 1rem}
td{border-top:1px solid #ddd;padding:.2rem .8rem .2rem 0;vertical-align:top}.method{display:inline-block;width:4.5rem;font-weight:600}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#e6e6e6}td{border-color:#444}}
</style></head><body>
<h1>rollout gateway</h1>
<p>The policy that is being trained, behind the APIs of OpenAI, Anthropic, vLLM, and SGLang. The document for tools is <a href="/openapi.json">/openapi.json</a>.</p>
<p>A key is sent as <code>Authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>. A request continues the session in its header
<code>X-Session-ID</code>, its URL <code>/sessions/{id}/...</code>, or its field <code>session_id</code>. An error has a <code>reason</code> and a <code>fix</code>.</p>
{{range $path, $methods := .Paths}}{{if not (session $path)}}{{range $method, $op := $methods}}
<details><summary><span class="method">{{upper $method}}</span> <code>{{$path}}</code> {{$op.Summary}}</summary>
{{with $op.Fields}}<table>{{$fields := .Properties}}{{$required := .Required}}{{range sorted .Properties}}<tr><td><code>{{.}}</code></td><td>{{kind (index $fields .)}}{{if required $required .}}, required{{end}}</td><td>{{(index $fields .).Description}}</td></tr>{{end}}</table>{{end}}
</details>{{end}}{{end}}{{end}}
</body></html>
`))
