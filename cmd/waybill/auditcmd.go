package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"waybill/journal/audit"
)

func newAudit(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Make a key for the audit log, verify, read and export it",
		Long: `The audit log holds every event of the journal, chained by hashes and sealed to a
public key: the proxy that writes it cannot read it back. "audit:" in the
configuration switches it on. docs/audit.md says what it proves, and what not.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newAuditKeygen(a), newAuditVerify(a), newAuditShow(a), newAuditExport(a), newAuditStatus(a))
	return cmd
}

func newAuditKeygen(a *app) *cobra.Command {
	var out string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "keygen --out FILE",
		Short: "Make a key pair: the private key into a file, the public one printed",
		Long: `Make a key pair. The private key goes into FILE (mode 0600, it must not exist), the
public one is printed: it is audit.recipient of the configuration.

Run it where the log will be read, not where the proxy runs. Without the private key
nobody reads the log any more: keep a copy.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if out == "" {
				return fail(exitUsage, "give --out FILE: the private key goes there")
			}
			key, err := audit.GenerateKey()
			if err != nil {
				return fail(exitFailure, "%w", err)
			}
			secret, err := key.Secret()
			if err != nil {
				return fail(exitFailure, "%w", err)
			}
			f, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if errors.Is(err, fs.ErrExist) {
				return fail(exitUsage, "%s exists; a key replaces nothing", out)
			}
			if err != nil {
				return fail(exitFailure, "%w", err)
			}
			_, err = fmt.Fprintf(f, "# private key of an audit log of waybill; its public key is\n# %s\n%s\n", key.Public(), secret)
			if err == nil {
				err = f.Sync()
			}
			if cerr := f.Close(); err == nil {
				err = cerr
			}
			if err != nil {
				return fail(exitFailure, "%w", err)
			}
			if asJSON {
				return printJSON(a.stdout, map[string]string{"file": out, "public_key": key.Public().String()})
			}
			_, err = fmt.Fprintln(a.stdout, key.Public())
			return err
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "the `file` for the private key")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	_ = cmd.MarkFlagFilename("out")
	return cmd
}

// auditFlags are those of the reading commands.
type auditFlags struct {
	folder, signer, key string
	checkpoints         []string
	asJSON              bool
}

func (f *auditFlags) register(cmd *cobra.Command, withKey bool) {
	fl := cmd.Flags()
	fl.StringVar(&f.folder, "folder", "", "`folder` of the log (default audit.folder of the configuration, else DATA/audit)")
	fl.StringArrayVar(&f.checkpoints, "checkpoint", nil, "`file` with checkpoints of the log that were kept elsewhere (-: standard input); more than one may be given")
	fl.StringVar(&f.signer, "signer", "", "public `key`, base64, that must have signed every checkpoint")
	if withKey {
		fl.StringVar(&f.key, "key", "", "`file` with the private key")
	}
	_ = cmd.MarkFlagDirname("folder")
}

func (a *app) auditOptions(f *auditFlags) (dir string, opt audit.VerifyOptions, err error) {
	opt.Signer = f.signer
	for _, path := range f.checkpoints {
		var b []byte
		if path == "-" {
			b, err = io.ReadAll(io.LimitReader(a.stdin, maxAdminDocument))
		} else {
			b, err = os.ReadFile(path)
		}
		if err != nil {
			return "", opt, fail(exitUsage, "--checkpoint: %w", err)
		}
		list, err := audit.ParseCheckpoints(string(b))
		if err != nil {
			return "", opt, fail(exitUsage, "--checkpoint %s: %w", path, err)
		}
		opt.Checkpoints = append(opt.Checkpoints, list...)
	}
	if f.folder != "" {
		return f.folder, opt, nil
	}
	data, err := a.dataDir()
	if err != nil {
		return "", opt, err
	}
	dir = auditFolder(data, a.configuredAudit())
	if _, err := os.Stat(dir); noFile(err) {
		return "", opt, fail(exitUnavailable, "there is no audit log in %s; give --folder, or switch it on with audit: in the configuration", dir)
	}
	return dir, opt, nil
}

func readAuditKey(path string) (*audit.PrivateKey, error) {
	if path == "" {
		return nil, fail(exitUsage, "give --key FILE: the private key that \"waybill audit keygen\" made")
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fail(exitUsage, "--key: %w", err)
	}
	key, err := audit.ParsePrivateKey(string(b))
	if err != nil {
		return nil, fail(exitUsage, "--key %s: %w", path, err)
	}
	return key, nil
}

// auditError gives the ways a log can be read an exit code.
func auditError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, audit.ErrBroken):
		return fail(exitJournalDamaged, "%w; keep a copy of the folder before anything else", err)
	case errors.Is(err, audit.ErrOpen):
		return fail(exitUsage, "%w: it was sealed to another one", err)
	case errors.Is(err, audit.ErrCheckpoint):
		return fail(exitJournalDamaged, "%w", err)
	default:
		return fail(exitUnavailable, "%w", err)
	}
}

func newAuditVerify(a *app) *cobra.Command {
	var f auditFlags
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check the chain of the log; needs no private key, and no proxy",
		Long: `Check that no record of the log was altered, removed from the middle or reordered,
and name the first one that was. It needs no private key.

That the log was cut at its end, put back to an older state, or replaced as a whole
is seen only with a checkpoint that was kept elsewhere: --checkpoint. It is not
proved that everything was recorded, nor what the remote side did. The exit code is 6
when something is wrong.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			dir, opt, err := a.auditOptions(&f)
			if err != nil {
				return err
			}
			rep, err := audit.Verify(dir, opt)
			if rep.Log != "" || rep.Broken != nil {
				if perr := printAuditReport(a, &rep, f.asJSON); perr != nil {
					return perr
				}
			}
			return auditError(err)
		},
	}
	f.register(cmd, false)
	cmd.Flags().BoolVar(&f.asJSON, "json", false, "print JSON")
	return cmd
}

func printAuditReport(a *app, rep *audit.Report, asJSON bool) error {
	if asJSON {
		return printJSON(a.stdout, rep)
	}
	p := &errWriter{w: a.stdout}
	row := func(name, format string, args ...any) {
		p.printf("%-12s "+format+"\n", append([]any{name}, args...)...)
	}
	head, err := rep.Head.MarshalText()
	if err != nil {
		return err
	}
	row("log", "%s, %s", rep.Log, plural(rep.Segments, "segment"))
	row("records", "%d to %d, %d of them events", rep.First, rep.Records, rep.Events)
	row("head", "%s, at event %d of the journal", head, rep.Seq)
	if rep.Removed > 0 {
		row("removed", "records 1 to %d, by retention, as the log says", rep.Removed)
	}
	row("checkpoints", "%d in the log, %d compared; signed by %s", rep.Checkpoints, rep.Compared, dash(strings.Join(rep.Signers, ", ")))
	for _, g := range rep.Gaps {
		row("gap", "%s: events %d to %d of the journal, found %s", g.Reason, g.From, g.To, g.At.Local().Format("2006-01-02 15:04:05"))
	}
	if rep.Unfinished {
		row("unfinished", "a proxy is writing; what it has not finished is not counted")
	}
	if rep.Broken == nil {
		p.printf("the log is whole\n")
	}
	return p.err
}

func newAuditShow(a *app) *cobra.Command {
	var (
		f      auditFlags
		action string
	)
	cmd := &cobra.Command{
		Use:   "show --key FILE",
		Short: "Print what the log holds, for people",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			out := bufio.NewWriter(a.stdout)
			err := a.readAudit(&f, func(o audit.Opened) error {
				if action != "" && o.Action != action {
					return nil
				}
				return printAuditRecord(out, &o)
			})
			return errors.Join(out.Flush(), err)
		},
	}
	f.register(cmd, true)
	cmd.Flags().StringVar(&action, "action", "", "only the events of the action with this `id`")
	return cmd
}

func newAuditExport(a *app) *cobra.Command {
	var f auditFlags
	cmd := &cobra.Command{
		Use:   "export --key FILE",
		Short: "Print what the log holds, one JSON object a line",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			out := bufio.NewWriter(a.stdout)
			enc := json.NewEncoder(out)
			enc.SetEscapeHTML(false)
			err := a.readAudit(&f, func(o audit.Opened) error { return enc.Encode(o) })
			return errors.Join(out.Flush(), err)
		},
	}
	f.register(cmd, true)
	return cmd
}

// readAudit calls print with each record, up to the first broken one.
func (a *app) readAudit(f *auditFlags, print func(audit.Opened) error) error {
	key, err := readAuditKey(f.key)
	if err != nil {
		return err
	}
	dir, opt, err := a.auditOptions(f)
	if err != nil {
		return err
	}
	_, err = audit.Read(dir, key, opt, print)
	return auditError(err)
}

func printAuditRecord(w io.Writer, o *audit.Opened) error {
	var err error
	switch {
	case o.Event != nil:
		detail := eventDetail(o.Event.Event)
		if a := o.Event.Accepted; a != nil {
			detail = fmt.Sprintf("%s %s by %s", a.Method, a.Target, a.Caller)
		}
		_, err = fmt.Fprintf(w, "%7d  %s  %-30s %-26s %-19s %s\n", o.Record.Record, o.Event.At.Local().Format("2006-01-02 15:04:05.000"), dash(o.Action), o.Event.Type, o.Source, printable(detail))
	case o.Gap != nil:
		_, err = fmt.Fprintf(w, "%7d  gap: %s, events %d to %d of the journal\n", o.Record.Record, o.Gap.Reason, o.Gap.From, o.Gap.To)
	case o.Checkpoint != nil:
		_, err = fmt.Fprintf(w, "%7d  checkpoint of %d records, %s\n", o.Record.Record, o.Checkpoint.Records, o.Checkpoint.At.Local().Format("2006-01-02 15:04:05"))
	case o.Cut != nil:
		_, err = fmt.Fprintf(w, "%7d  retention removes records up to %d\n", o.Record.Record, o.Cut.Records)
	}
	return err
}

func newAuditStatus(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show how far the running proxy's log is, and where its checkpoints arrived",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withProxyOr(cmd.Context(), "\"waybill audit verify\" needs none", func(client *adminClient) error {
				var doc map[string]any
				if err := client.get(cmd.Context(), http.MethodGet, "/v1/audit", nil, nil, &doc); err != nil {
					return err
				}
				return printReport(a, doc, asJSON)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
