package output

import "fmt"

// Style adds colors to text. The zero value adds none.
type Style struct{ Color bool }

func (s Style) sgr(code int, text string) string {
	if !s.Color || text == "" {
		return text
	}
	return fmt.Sprintf("\x1b[%dm%s\x1b[0m", code, text)
}

// Bold is for headings and key values.
func (s Style) Bold(text string) string { return s.sgr(1, text) }

// Dim is for details.
func (s Style) Dim(text string) string { return s.sgr(2, text) }

// Red is for failures.
func (s Style) Red(text string) string { return s.sgr(31, text) }

// Green is for success.
func (s Style) Green(text string) string { return s.sgr(32, text) }

// Yellow is for warnings.
func (s Style) Yellow(text string) string { return s.sgr(33, text) }

// Cyan is for commands and hints.
func (s Style) Cyan(text string) string { return s.sgr(36, text) }
