package plan

import "regexp"

var pluginForm = regexp.MustCompile(`^([^:]+\.(py|toml)|[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?):[A-Za-z_][A-Za-z0-9_]*$`)

// IsPlugin reports whether a text has the form of a plugin: `file.py:name`, `plugin.toml:NAME`, or
// `DISTRIBUTION:NAME`.
func IsPlugin(text string) bool { return pluginForm.MatchString(text) }
