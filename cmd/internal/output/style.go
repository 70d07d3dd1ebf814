package output

import "fmt"

// Style writes colours or leaves them out. The zero value leaves them out.
type Style struct{ Color bool }

func (s Style) sgr(code int, text string) string {
	if !s.Color || text == "" {
		return text
	}
	return fmt.Sprintf("\x1b[%dm%s\x1b[0m", code, text)
}

// Bold is for what matters most.
func (s Style) Bold(text string) string { return s.sgr(1, text) }

// Dim is for what is there but seldom read.
func (s Style) Dim(text string) string { return s.sgr(2, text) }

// Red is for what failed.
func (s Style) Red(text string) string { return s.sgr(31, text) }

// Green is for what went well.
func (s Style) Green(text string) string { return s.sgr(32, text) }

// Yellow is for what deserves a look.
func (s Style) Yellow(text string) string { return s.sgr(33, text) }

// Cyan is for what helps.
func (s Style) Cyan(text string) string { return s.sgr(36, text) }
