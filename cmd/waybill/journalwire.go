package main

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/spf13/cobra"

	"waybill/dispatch"
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

// journalVerification is what "waybill journal verify" prints.
type journalVerification struct {
	OK bool `json:"ok"`
	// Problem names the first broken record, or says that the store is behind its
	// witness. It holds no recorded data.
	Problem string `json:"problem,omitempty"`
	// Quarantined: every record that is there is in order, but what happened after the
	// last one may be missing (CONTRACT M5).
	Quarantined bool `json:"quarantined,omitempty"`
	journal.Report
}

// verification sorts the ways apart in which a verification ends: damage is a
// result, everything else is an error.
func verification(r journal.Report, err error) (journalVerification, error) {
	v := journalVerification{OK: err == nil, Report: r}
	if errors.Is(err, journal.ErrCorrupt) || errors.Is(err, dispatch.ErrQuarantined) {
		v.Problem, err = err.Error(), nil
	}
	if v.Quarantined = r.Quarantine != ""; v.Quarantined {
		v.Problem = r.Quarantine
	}
	return v, err
}

func verifyRunning(ctx context.Context, j *journal.Journal) (any, error) {
	return verification(j.Verify(ctx))
}

// verifyOffline is for "waybill journal verify" while no proxy runs.
func verifyOffline(cmd *cobra.Command, _ *app, data string) (any, string, error) {
	if err := hasJournal(data); err != nil {
		return nil, "", err
	}
	v, err := verification(journal.Verify(cmd.Context(), filepath.Join(data, "journal"), nil))
	if err != nil {
		return nil, "", journalError(data, err)
	}
	return v, v.Problem, nil
}

// damageIn reads the document of a running proxy.
func damageIn(doc map[string]any) string {
	if ok, _ := doc["ok"].(bool); ok {
		return ""
	}
	if s, _ := doc["problem"].(string); s != "" {
		return s
	}
	return "the report does not say that it is whole"
}
