package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"waybill/journal"
)

func newJournalAcknowledge(a *app) *cobra.Command {
	var reason string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "acknowledge --reason TEXT",
		Short: "Let a quarantined journal go on with what it has",
		Long: `Let a quarantined journal go on with what it has.

A journal is quarantined when its store is behind its witness - an older copy was
put back, or a part was lost - or after "waybill journal restore". It is read, and
nothing new is dispatched, until somebody has looked into it and says so here.

Afterwards every action of which only the witness knows is unknown, and stays so.
Actions that neither knows are not found: that is no permission to repeat them.
Settle with the remote sides first what may have happened in the time that is
missing. The reason is recorded in the journal for good; it must hold no secret.

While a proxy runs it takes effect when that proxy is started again.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.acknowledge(cmd.Context(), reason, asJSON) },
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why it may go on, up to 500 bytes of `text`; recorded")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// acknowledged is what "journal acknowledge --json" prints.
type acknowledged struct {
	Acknowledged bool `json:"acknowledged"`
	// Restart: it takes effect at the running proxy's next start, which tells the rest.
	Restart    bool   `json:"restart"`
	Quarantine string `json:"quarantine,omitempty"` // why it was in quarantine
	Unknown    *int   `json:"unknown,omitempty"`    // actions that only the witness knew
}

func (a *app) acknowledge(ctx context.Context, reason string, asJSON bool) error {
	if strings.TrimSpace(reason) == "" {
		return fail(exitUsage, "give --reason TEXT: what was looked into, and by whom")
	}
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	client, err := a.running(ctx, data)
	if errors.Is(err, errNotRunning) {
		return a.acknowledgeOffline(data, reason, asJSON)
	}
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	resp, err := client.do(ctx, http.MethodPost, pathAcknowledge, nil, acknowledgeRequest{reason})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return fail(exitUnavailable, "the proxy stopped answering: %w", err)
	}
	var out acknowledgeAnswer
	if json.Unmarshal(b, &out) != nil {
		return adminError(resp.StatusCode, b)
	}
	switch {
	case resp.StatusCode == http.StatusBadRequest:
		return fail(exitUsage, "%s", out.Problem)
	case !out.Acknowledged:
		return fail(exitFailure, "%s", out.Problem)
	}
	if asJSON {
		return printJSON(a.stdout, acknowledged{Acknowledged: true, Restart: true})
	}
	_, err = fmt.Fprintln(a.stdout, "acknowledged; it takes effect when the proxy is started again")
	return err
}

// acknowledgeOffline writes the acknowledgement down and makes one start with it.
func (a *app) acknowledgeOffline(data, reason string, asJSON bool) error {
	// A look first: a start that is not needed would leave its mark.
	look, err := openForReading(data)
	if err != nil {
		return err
	}
	quarantined := look.Recovery().Quarantined
	if err := look.Close(); err != nil {
		return fail(exitFailure, "%w", err)
	}
	if !quarantined {
		return fail(exitFailure, "%w", journal.ErrNotQuarantined)
	}
	build := readBuildInfo()
	j, r, err := journal.Open(journal.Options{
		Dir: filepath.Join(data, "journal"), AllowAnyFilesystem: true, SweepInterval: -1,
		Build: strings.TrimSpace(build.Version + " " + build.Revision), Acknowledge: &journal.Acknowledgement{Reason: reason},
	})
	switch {
	case errors.Is(err, journal.ErrReason):
		return fail(exitUsage, "%w", err)
	case err != nil:
		return journalError(data, err)
	}
	if err := j.Close(); err != nil {
		return fail(exitFailure, "%w", err)
	}
	if r.Acknowledged == nil {
		return fail(exitFailure, "%w", journal.ErrNotQuarantined)
	}
	lost := len(r.Lost)
	if asJSON {
		return printJSON(a.stdout, acknowledged{Acknowledged: true, Quarantine: r.Acknowledged.Quarantine, Unknown: &lost})
	}
	_, err = fmt.Fprintf(a.stdout, "acknowledged: %s\n%d actions that only the witness knew are unknown\n", r.Acknowledged.Quarantine, lost)
	return err
}

func newJournalBackup(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Write a sealed copy of the journal, also while the proxy runs",
		Long: `Write a sealed copy of the journal as of one moment, also while the proxy runs.

The copy holds events, results and the witness. It is sealed with the journal's data
key, which is not in it: keep a copy of DATA/journal/key somewhere else, for without
it no backup can be restored. FILE must not exist; it appears whole or not at all.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.backup(cmd.Context(), args[0], asJSON) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) backup(ctx context.Context, path string, asJSON bool) error {
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	client, err := a.running(ctx, data)
	if err != nil && !errors.Is(err, errNotRunning) {
		return err
	}
	write := func(w io.Writer) error {
		if err := hasJournal(data); err != nil {
			return err
		}
		if _, err := journal.Backup(ctx, filepath.Join(data, "journal"), w); err != nil {
			return journalError(data, err)
		}
		return nil
	}
	if err == nil {
		defer func() { _ = client.Close() }()
		write = func(w io.Writer) error {
			resp, err := client.do(ctx, http.MethodGet, pathBackup, nil, nil)
			if err != nil {
				return err
			}
			defer func() { _ = resp.Body.Close() }()
			if resp.StatusCode != http.StatusOK {
				b, _ := io.ReadAll(io.LimitReader(resp.Body, maxAdminDocument))
				return adminError(resp.StatusCode, b)
			}
			if _, err := io.Copy(w, resp.Body); err != nil {
				return fail(exitUnavailable, "the backup broke off: %w", err)
			}
			return nil
		}
	}
	n, err := writeBackup(path, write)
	if err != nil {
		return err
	}
	key := filepath.Join(data, "journal", "key")
	if asJSON {
		return printJSON(a.stdout, map[string]any{"file": path, "bytes": n, "key": key})
	}
	_, err = fmt.Fprintf(a.stdout, "%s: %d bytes, sealed with %s\n", path, n, key)
	return err
}

// writeBackup makes a file of mode 0600 that appears durable and whole, or not at all.
func writeBackup(path string, write func(io.Writer) error) (n int64, err error) {
	if _, err := os.Lstat(path); err == nil {
		return 0, fail(exitUsage, "%s exists; a backup replaces nothing", path)
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.part")
	if err != nil {
		return 0, fail(exitFailure, "%w", err)
	}
	defer func() {
		if rerr := os.Remove(f.Name()); err == nil && rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			err = rerr
		}
	}()
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		n, err = f.Seek(0, io.SeekEnd)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Link(f.Name(), path) // unlike rename, fails if there is one
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}

func newJournalRestore(a *app) *cobra.Command {
	var key string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "restore FILE --data FOLDER --key FILE",
		Short: "Make a journal of a backup",
		Long: `Make a journal of a backup, in a data folder that has none: nothing is replaced.

The restored journal is quarantined: nothing in it tells what happened after the
backup. It can be read, and an action that it does not know is unknown. Find out with
the remote sides what was done since, then: waybill journal acknowledge --reason …
Where the old witness is still there, put DATA/journal/witness of then in place of
the restored one before the first start: it names the actions that are missing.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return a.restore(cmd.Context(), args[0], key, asJSON) },
	}
	cmd.Flags().StringVar(&key, "key", "", "the data key of the journal that was backed up: its DATA/journal/key, a `file` of mode 0600")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) restore(ctx context.Context, path, keyFile string, asJSON bool) error {
	if keyFile == "" {
		return fail(exitUsage, "give --key FILE: the DATA/journal/key of the journal that was backed up; it is not in the backup")
	}
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	key, err := journal.ReadKey(keyFile)
	if err != nil {
		return fail(exitConfig, "%w", err)
	}
	f, err := os.Open(path)
	if err != nil {
		return fail(exitUsage, "%w", err)
	}
	defer func() { _ = f.Close() }()
	if err := makeDataDir(data); err != nil {
		return err
	}
	info, err := journal.Restore(ctx, f, filepath.Join(data, "journal"), bytes.Clone(key), nil)
	switch {
	case errors.Is(err, fs.ErrExist):
		return fail(exitUsage, "%w", err)
	case errors.Is(err, journal.ErrBackup), errors.Is(err, journal.ErrCorrupt):
		return fail(exitJournalDamaged, "%s: %w", path, err)
	case err != nil:
		return journalError(data, err)
	}
	if asJSON {
		return printJSON(a.stdout, map[string]any{"seq": info.Seq, "at": info.At, "quarantined": true})
	}
	_, err = fmt.Fprintf(a.stdout, "restored to event %d, of %s\nthe journal is quarantined: what happened since is not on record; then: waybill journal acknowledge --reason TEXT\n", info.Seq, info.At.Format("2006-01-02T15:04:05Z07:00"))
	return err
}
