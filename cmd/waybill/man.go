package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// newMan writes the manual pages; "make install" and the release call it.
func newMan(a *app) *cobra.Command {
	return &cobra.Command{
		Use:    "man FOLDER",
		Short:  "Write the manual pages into a folder",
		Args:   cobra.ExactArgs(1),
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil { //nolint:gosec // manual pages are for everybody
				return fail(exitFailure, "man: %w", err)
			}
			// The same pages from the same source: no date of today.
			day := time.Unix(0, 0).UTC()
			h := &doc.GenManHeader{Title: "WAYBILL", Section: "1", Source: "waybill " + readBuildInfo().Version, Manual: "Waybill", Date: &day}
			root := cmd.Root()
			root.DisableAutoGenTag = true
			if err := doc.GenManTree(root, h, args[0]); err != nil {
				return fail(exitFailure, "man: %w", err)
			}
			return nil
		},
	}
}
