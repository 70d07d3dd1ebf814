package edge

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"net/http"
	"strings"
)

//go:embed playground.html
var playground []byte

// policy allows the style and the script of the page, and requests to this gateway. Nothing else
// is loaded, and no other page can frame it.
var policy = strings.Join([]string{
	"default-src 'none'", "style-src " + hashOf("style"), "script-src " + hashOf("script"), "connect-src 'self'",
	"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
}, "; ")

// hashOf is the source of the element of the page with this tag.
func hashOf(tag string) string {
	_, after, _ := bytes.Cut(playground, []byte("<"+tag+">"))
	text, _, _ := bytes.Cut(after, []byte("</"+tag+">"))
	sum := sha256.Sum256(text)
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// Playground is the route of a page to chat with the policies. The page is public; its requests
// need a key like others.
func (e *Edge) Playground() Route {
	return Route{Method: http.MethodGet, Path: "/{$}", About: "A page to chat with the policies.", Body: PlainBody, Open: true, Serve: func(w http.ResponseWriter, _ *http.Request) error {
		header := w.Header()
		header.Set("Content-Type", "text/html; charset=utf-8")
		header.Set("Content-Security-Policy", policy)
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Referrer-Policy", "no-referrer")
		header.Set("Cache-Control", "no-cache")
		_, err := w.Write(playground)
		return err
	}}
}
