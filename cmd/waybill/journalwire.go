package main

import (
	"context"

	"github.com/spf13/cobra"

	"waybill/journal"
)

// journalStats is what "waybill journal stats" prints.
type journalStats struct {
	journal.Stats
	journal.Counts
}

func statsOf(j *journal.Journal) (journalStats, error) {
	counts, err := j.Count()
	return journalStats{j.Stats(), counts}, err
}

// statsOffline is for "waybill journal stats" while no proxy runs.
func statsOffline(_ *cobra.Command, _ *app, data string) (any, string, error) {
	j, err := openForReading(data)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = j.Close() }()
	st, err := statsOf(j)
	return st, "", err
}

func verifyRunning(ctx context.Context, j *journal.Journal) (any, error) {
	return nil, nil
}

// verifyOffline is for "waybill journal verify" while no proxy runs.
func verifyOffline(_ *cobra.Command, _ *app, data string) (any, string, error) {
	return nil, "", nil
}

func damageIn(map[string]any) string { return "" }
