package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// withoutJSON are the commands that have no --json, and docs/cli.md says why: they print
// one document as it is, JSON in two cases, or carry what is not theirs.
var withoutJSON = []string{
	"audit export", "audit show", "bugreport", "ca export", "connect", "journal evidence", "mcp", "serve",
}

// TestEveryReportHasJSON holds what docs/cli.md says of --json against the commands.
func TestEveryReportHasJSON(t *testing.T) {
	page, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	var without []string
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		name, _ := strings.CutPrefix(c.CommandPath(), "waybill ")
		switch {
		case c.Hidden || name == "help" || name == "completion":
			return
		case c.HasSubCommands():
		case c.Flags().Lookup("json") == nil && c.InheritedFlags().Lookup("json") == nil:
			without = append(without, name)
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	root := newRoot(&app{})
	walk(root)
	slices.Sort(without)
	if !slices.Equal(without, withoutJSON) {
		t.Errorf("without --json are %q, not %q", without, withoutJSON)
	}
	_, said, _ := strings.Cut(string(page), "## JSON\n")
	said, _, _ = strings.Cut(said, "\n\n")
	for _, name := range append([]string{"completion"}, without...) {
		if !strings.Contains(said, "`"+name+"`") {
			t.Errorf("docs/cli.md does not say that %s has no --json", name)
		}
	}
}

// The rarer commands report as JSON, too, running and stopped.
func TestRareReportsAsJSON(t *testing.T) {
	b := newRunBed(t, "")
	read := func(code exitCode, args ...string) map[string]any {
		t.Helper()
		r := b.waybill(append(args, "--json")...)
		doc := map[string]any{}
		if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil || r.code != int(code) {
			t.Fatalf("%v: %v %+v", args, err, r)
		}
		return doc
	}
	key := filepath.Join(b.dir, "audit.key")
	if doc := read(exitOK, "audit", "keygen", "--out", key); doc["file"] != key || !strings.HasPrefix(doc["public_key"].(string), "wbaudit") {
		t.Errorf("audit keygen: %v", doc)
	}
	if doc := read(exitUnavailable, "health", "--metrics", "127.0.0.1:1"); doc["ok"] != false || doc["reason"] == "" {
		t.Errorf("health of nothing: %v", doc)
	}
	stop := b.serve()
	data := filepath.Join(b.dir, "data")
	c, err := dialAdmin(t.Context(), filepath.Join(data, "admin.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	st, err := c.status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if doc := read(exitOK, "health", "--metrics", st.Metrics); doc["ok"] != true {
		t.Errorf("health: %v", doc)
	}
	backup := filepath.Join(b.dir, "backup")
	sealed := filepath.Join(data, "journal", "key")
	if doc := read(exitOK, "journal", "backup", backup); doc["file"] != backup || doc["bytes"].(float64) == 0 || doc["key"] != sealed {
		t.Errorf("journal backup: %v", doc)
	}
	stop()
	other := filepath.Join(b.dir, "other")
	if doc := read(exitOK, "journal", "restore", backup, "--data", other, "--key", sealed); doc["quarantined"] != true || doc["seq"].(float64) == 0 {
		t.Errorf("journal restore: %v", doc)
	}
	if doc := read(exitOK, "journal", "acknowledge", "--data", other, "--reason", "looked"); doc["acknowledged"] != true || doc["restart"] != false || doc["unknown"].(float64) != 0 {
		t.Errorf("journal acknowledge: %v", doc)
	}
	// Again, with a proxy that runs.
	if err := os.RemoveAll(data); err != nil {
		t.Fatal(err)
	}
	read(exitOK, "journal", "restore", backup, "--key", filepath.Join(other, "journal", "key"))
	b.serve()
	if doc := read(exitOK, "journal", "acknowledge", "--reason", "looked"); doc["acknowledged"] != true || doc["restart"] != true {
		t.Errorf("journal acknowledge, running: %v", doc)
	}
}
