package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func newJournal(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "journal",
		Short: "Verify, back up and restore the journal, show its figures, end its quarantine",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newJournalVerify(a), newJournalStats(a), newJournalAcknowledge(a), newJournalBackup(a), newJournalRestore(a), newJournalEvidence(a), newJournalImport(a))
	return cmd
}

func newJournalVerify(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check every record: sequence, hash chain, seals, projections, witness",
		Long: `Check every record: the sequence has no hole, the hash chain is whole, every seal
opens, every projection is what its events make of it, and the store is not
behind its witness.

It proves that what is recorded was not altered, removed from the middle or
reordered; it does not prove that everything was recorded, nor what the remote
side did. The exit code is 6 when something is damaged.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			doc, damage, err := a.journalReport(cmd, "/v1/journal/verify", verifyOffline)
			if err != nil {
				return err
			}
			if err := printReport(a, doc, asJSON); err != nil {
				return err
			}
			if quarantined, _ := doc["quarantined"].(bool); quarantined {
				return fail(exitJournalDamaged, "journal: in quarantine: %s; what is there is whole. What happened since its end is not on record: settle that with the remote sides, then: waybill journal acknowledge --reason TEXT", damage)
			}
			if damage != "" {
				return fail(exitJournalDamaged, "journal: damaged: %s; keep a copy of the folder before anything else", damage)
			}
			if !asJSON {
				_, err = fmt.Fprintln(a.stdout, "the journal is whole")
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newJournalStats(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "stats",
		Short: "Show the journal's figures",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			doc, _, err := a.journalReport(cmd, "/v1/journal/stats", statsOffline)
			if err != nil {
				return err
			}
			return printReport(a, doc, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// journalReport asks the running proxy, or the journal itself. damage names what
// is broken, or is "".
func (a *app) journalReport(cmd *cobra.Command, path string, offline func(*cobra.Command, *app, string) (any, string, error)) (doc map[string]any, damage string, err error) {
	data, err := a.dataDir()
	if err != nil {
		return nil, "", err
	}
	client, err := a.running(cmd.Context(), data)
	if errors.Is(err, errNotRunning) {
		v, damage, err := offline(cmd, a, data)
		if err != nil {
			return nil, "", err
		}
		raw, err := json.Marshal(v)
		if err != nil {
			return nil, "", err
		}
		return doc, damage, json.Unmarshal(raw, &doc)
	}
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = client.Close() }()
	if err := client.get(cmd.Context(), http.MethodGet, path, nil, nil, &doc); err != nil {
		return nil, "", err
	}
	return doc, damageIn(doc), nil
}

func printReport(a *app, doc map[string]any, asJSON bool) error {
	if asJSON {
		return printJSON(a.stdout, doc)
	}
	p := &errWriter{w: a.stdout}
	for _, k := range slices.Sorted(maps.Keys(doc)) {
		switch v := doc[k].(type) {
		case map[string]any, []any:
			raw, err := json.Marshal(v)
			if err != nil {
				return err
			}
			p.printf("%-24s %s\n", k, raw)
		case float64:
			if name, ok := strings.CutSuffix(k, "_ns"); ok {
				p.printf("%-24s %v\n", name, time.Duration(v))
				continue
			}
			p.printf("%-24s %.0f\n", k, v)
		default:
			p.printf("%-24s %v\n", k, v)
		}
	}
	return p.err
}
