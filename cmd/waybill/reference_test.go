package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

var updateReference = flag.Bool("update", false, "write docs/commands.md")

// TestCommandReference holds docs/commands.md against the commands.
func TestCommandReference(t *testing.T) {
	root := newRoot(&app{})
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	var b strings.Builder
	b.WriteString(`# Commands

<!-- Written from the commands themselves by "go test ./cmd/waybill -run TestCommandReference -update". Do not edit. -->

Exit codes, files, variables and JSON forms, which all commands share: [cli.md](cli.md). The same pages as manual pages:
` + "`make install`" + `.

`)
	flags := func(title, text string) {
		if text = strings.TrimRight(text, "\n"); text != "" {
			fmt.Fprintf(&b, "%s\n\n```text\n%s\n```\n\n", title, text)
		}
	}
	flags("Flags of every command:", root.PersistentFlags().FlagUsages())
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" {
			return
		}
		if c != root && (c.Runnable() || c.HasAvailableSubCommands()) {
			if c.Short == "" {
				t.Errorf("%s has no short text", c.CommandPath())
			}
			fmt.Fprintf(&b, "## %s\n\n```text\n%s\n```\n\n", c.CommandPath(), c.UseLine())
			if c.Parent() != nil && c.Parent().Name() == "completion" || c.Name() == "completion" {
				fmt.Fprintf(&b, "%s.\n\n", strings.TrimSuffix(c.Short, "."))
			} else {
				text := c.Short + "."
				if c.Long != "" {
					text = c.Long
				}
				fmt.Fprintf(&b, "```text\n%s\n```\n\n", strings.TrimSpace(text))
			}
			if c.Example != "" {
				fmt.Fprintf(&b, "```text\n%s\n```\n\n", c.Example)
			}
			c.InitDefaultHelpFlag()
			flags("Flags:", c.NonInheritedFlags().FlagUsages())
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	got := strings.TrimRight(b.String(), "\n") + "\n"
	const path = "../../docs/commands.md"
	if *updateReference {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil { //nolint:gosec // a document
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s is not what the commands say; run: go test ./cmd/waybill -run TestCommandReference -update", path)
	}
}
