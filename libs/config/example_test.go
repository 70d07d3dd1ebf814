package config

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// The example file names every key with its default.
func TestExampleFile(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../deploy/rolloutd.toml")
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	if !strings.Contains(text, "\n# state_dir = ") {
		t.Error("no state_dir")
	}
	var lines []string
	for line := range strings.Lines(text) {
		if setting, ok := strings.CutPrefix(line, "# "); ok && strings.Contains(setting, " = ") && !strings.HasPrefix(setting, "state_dir") {
			line = setting
		}
		lines = append(lines, line)
	}
	c, err := Load([]string{"--config", write(t, strings.Join(lines, ""))}, home, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	want := withShared(Default("/home/u/.local/state/rollout"))
	want.Worker.Command, want.Worker.Env = []string{}, []string{}
	if !reflect.DeepEqual(c, want) {
		t.Errorf("got  %+v\nwant %+v", c, want)
	}
	for _, k := range keys {
		name := k.name[strings.LastIndex(k.name, ".")+1:]
		if !strings.Contains(text, "\n# "+name+" = ") {
			t.Errorf("%s is not in the example", k.name)
		}
	}
}

func TestPostgresURL(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keep := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const url = "postgres://u:hunter2@h/db"
	for name, c := range map[string]struct {
		database  Database
		want, err string
	}{
		"sqlite":        {},
		"inline":        {Database{URL: "postgres://u@h/db"}, "postgres://u@h/db", ""},
		"file":          {Database{URL: "file:" + keep("url", url+"\n", 0o600)}, url, ""},
		"variable":      {Database{URL: "env:DB"}, url, ""},
		"open file":     {Database{URL: "file:" + keep("open", url, 0o644)}, "", "chmod 600"},
		"no file":       {Database{URL: "file:" + dir + "/none"}, "", "database.url"},
		"empty file":    {Database{URL: "file:" + keep("empty", "", 0o600)}, "", "is empty"},
		"no variable":   {Database{URL: "env:NONE"}, "", "NONE"},
		"something odd": {Database{URL: "env:ODD"}, "", "postgres://"},
	} {
		got, err := c.database.Postgres([]string{"DB=" + url, "ODD=mysql://u:hunter2@h/db"})
		if got != c.want || (err == nil) != (c.err == "") || err != nil && (!strings.Contains(err.Error(), c.err) || strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
