package config

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

const migrating = "../../../docs/migrating.md"

// TestTheConfigurationsOfTheMigrationGuideAreValid reads the TOML blocks of the guide.
func TestTheConfigurationsOfTheMigrationGuideAreValid(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(migrating)
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```toml\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	if len(blocks) < 2 {
		t.Errorf("%d configurations", len(blocks))
	}
	for _, block := range blocks {
		if r := read(t, block[1]); !r.Problems.Empty() {
			t.Errorf("%s\n%s", block[1], problems(r)+suggestions(r))
		}
	}
}

// TestTheMigrationGuideListsEveryName compares the tables of the guide with foreign.toml; `make
// docs` writes them.
func TestTheMigrationGuideListsEveryName(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(migrating)
	if err != nil {
		t.Fatal(err)
	}
	for _, trainer := range trainers {
		_, section, found := strings.Cut(string(text), "<!-- names: "+trainer.section+" -->")
		if section, _, _ = strings.Cut(section, "<!-- end -->"); !found && trainer.section != "other" {
			t.Errorf("no table of %s", trainer.title)
		}
		for name, entry := range foreignSections()[trainer.section] {
			row := "| `" + name + "` | "
			if entry.Key != "" {
				row += "`" + entry.Key + "`"
			}
			if found && (!strings.Contains(section, row) || !strings.Contains(section, entry.Note)) {
				t.Errorf("%s of %s has no row, or an old one: run `make docs`", name, trainer.title)
			}
		}
	}
}
