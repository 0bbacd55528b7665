package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"waybill/inject"
	"waybill/inject/keyring"
	"waybill/inject/vault"
)

// openVault returns the vault of the data folder, locked.
func openVault(data string) *vault.Vault {
	return vault.Open(filepath.Join(data, "vault"), keyring.System{})
}

// vaultFlags say how the vault is opened.
type vaultFlags struct {
	passphraseFile string
	identity       string
	asJSON         bool
}

func newVault(a *app) *cobra.Command {
	var f vaultFlags
	cmd := &cobra.Command{
		Use:   "vault",
		Short: "Keep secrets in Waybill's own encrypted store",
		Long: `Keep secrets in Waybill's own store: files in the data folder, encrypted with age.

A credential uses a secret of it with from: {vault: NAME}. The store is opened with
a passphrase, an age identity file, or a key in the operating system's keyring; with
the last two a proxy opens it by itself when it starts. While it is locked, requests
that need it end with VAULT_LOCKED, before anything is sent.

Passphrases are asked for on the terminal, or read from --passphrase-file. A running
proxy notices changes by itself.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	p := cmd.PersistentFlags()
	p.StringVar(&f.passphraseFile, "passphrase-file", "", "read the passphrase from this `file`")
	p.StringVar(&f.identity, "identity", "", "age identity `file` (X25519) that opens it")
	p.BoolVar(&f.asJSON, "json", false, "print JSON")
	var inKeyring bool
	initCmd := &cobra.Command{
		Use: "init", Short: "Make the store", Args: cobra.NoArgs,
		Long: `Make the store, empty. With --identity it opens with that file (make one with
"age-keygen -o FILE"), with --keyring with a key that is put into the operating system's
keyring, else with a passphrase.`,
		RunE: func(*cobra.Command, []string) error { return a.vaultInit(&f, inKeyring) },
	}
	initCmd.Flags().BoolVar(&inKeyring, "keyring", false, "keep the key in the operating system's keyring")
	cmd.AddCommand(initCmd,
		&cobra.Command{Use: "set NAME", Short: "Store a secret, read from standard input or the terminal", Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error { return a.vaultSet(cmd.Context(), &f, args[0]) }},
		&cobra.Command{Use: "list", Short: "List the names, never the values", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return a.vaultList(cmd.Context(), &f) }},
		&cobra.Command{Use: "rm NAME", Short: "Remove a secret", Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error { return a.vaultRemove(cmd.Context(), &f, args[0]) }},
		&cobra.Command{Use: "lock", Short: "Make the running proxy forget the key", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return a.vaultTell(cmd.Context(), &f, "/lock", nil) }},
		&cobra.Command{Use: "unlock", Short: "Give the running proxy the key", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return a.vaultUnlock(cmd.Context(), &f) }},
	)
	return cmd
}

func (a *app) vaultInit(f *vaultFlags, inKeyring bool) error {
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	if err := makeDataDir(data); err != nil {
		return err
	}
	o := vault.InitOptions{Keyring: inKeyring}
	switch {
	case inKeyring && f.identity != "":
		return fail(exitUsage, "--keyring and --identity exclude each other")
	case f.identity != "":
		if o.Identity, err = filepath.Abs(f.identity); err != nil {
			return fail(exitUsage, "--identity: %w", err)
		}
	case !inKeyring:
		if o.Passphrase, err = a.passphrase(f, true); err != nil {
			return err
		}
	}
	if err := openVault(data).Init(o); err != nil {
		return a.vaultError(err)
	}
	return a.vaultDone(f, vaultStatus{}, "made; store a secret with \"waybill vault set NAME\"")
}

// vaultError gives an error of the vault its exit code.
func (a *app) vaultError(err error) error {
	code := exitFailure
	switch {
	case errors.Is(err, vault.ErrNotFound), errors.Is(err, vault.ErrNone):
		code = exitNotFound
	case errors.Is(err, errBadSecretName):
		code = exitUsage
	case errors.Is(err, os.ErrNotExist), errors.Is(err, os.ErrPermission):
		return fail(exitFailure, "%w", err)
	}
	return fail(code, "%s", vaultProblem(err))
}

func (a *app) vaultDone(f *vaultFlags, doc vaultStatus, text string) error {
	if f.asJSON {
		return printJSON(a.stdout, doc)
	}
	_, err := fmt.Fprintln(a.stdout, text)
	return err
}

// passphrase reads it from the file that was named, or from the terminal.
func (a *app) passphrase(f *vaultFlags, twice bool) (string, error) {
	if f.passphraseFile != "" {
		text, err := os.ReadFile(f.passphraseFile)
		if err != nil {
			return "", fail(exitUsage, "--passphrase-file: %w", err)
		}
		text, _ = bytes.CutSuffix(text, []byte("\n"))
		text, _ = bytes.CutSuffix(text, []byte("\r"))
		if len(text) == 0 {
			return "", fail(exitUsage, "--passphrase-file: it is empty")
		}
		return string(text), nil
	}
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return "", fail(exitUsage, "a passphrase is needed and there is no terminal; give --passphrase-file FILE")
	}
	defer func() { _ = tty.Close() }()
	ask := func(prompt string) (string, error) {
		_, _ = fmt.Fprint(tty, prompt)
		b, err := term.ReadPassword(int(tty.Fd()))
		_, _ = fmt.Fprintln(tty)
		return string(b), err
	}
	first, err := ask("Passphrase of the vault: ")
	if err != nil || first == "" {
		return "", fail(exitUsage, "no passphrase was given")
	}
	if twice {
		if second, err := ask("Once more: "); err != nil || second != first {
			return "", fail(exitUsage, "the passphrases differ")
		}
	}
	return first, nil
}

// unlockedVault opens the vault of the data folder here, without a person if possible.
func (a *app) unlockedVault(f *vaultFlags) (*vault.Vault, error) {
	data, err := a.dataDir()
	if err != nil {
		return nil, err
	}
	v := openVault(data)
	err = v.Unlock("", f.identity)
	if errors.Is(err, vault.ErrLocked) {
		var pass string
		if pass, err = a.passphrase(f, false); err != nil {
			return nil, err
		}
		err = v.Unlock(pass, "")
	}
	if err != nil {
		return nil, a.vaultError(err)
	}
	return v, nil
}

// throughProxy asks a running proxy whose vault is open: it needs no passphrase. ok is
// false when there is none.
func (a *app) throughProxy(ctx context.Context, f *vaultFlags, method, path string, body []byte) (doc vaultStatus, ok bool, err error) {
	if f.passphraseFile != "" || f.identity != "" {
		return doc, false, nil
	}
	data, err := a.dataDir()
	if err != nil {
		return doc, false, err
	}
	client, err := a.running(ctx, data)
	if err != nil {
		return doc, false, nil //nolint:nilerr // then the files are opened here
	}
	defer func() { _ = client.Close() }()
	if doc, err = client.vault(ctx, http.MethodGet, "", nil); err != nil || doc.Locked {
		return doc, false, nil //nolint:nilerr // as above
	}
	if method != http.MethodGet {
		doc, err = client.vault(ctx, method, path, body)
	}
	return doc, true, err
}

// vault sends one request to the vault of the running proxy.
func (c *adminClient) vault(ctx context.Context, method, path string, body []byte) (vaultStatus, error) {
	var doc vaultStatus
	req, err := http.NewRequestWithContext(ctx, method, "http://waybill"+pathVault+path, bytes.NewReader(body))
	if err != nil {
		return doc, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return doc, fail(exitUnavailable, "the proxy stopped answering")
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminDocument))
	if err != nil {
		return doc, fail(exitUnavailable, "the proxy stopped answering: %w", err)
	}
	if json.Unmarshal(text, &doc) != nil || resp.StatusCode != http.StatusOK && doc.Problem == "" {
		return doc, adminError(resp.StatusCode, text)
	}
	switch doc.Problem {
	case "":
		return doc, nil
	case vault.ErrNotFound.Error(), vault.ErrNone.Error():
		return doc, fail(exitNotFound, "%s", doc.Problem)
	case errBadSecretName.Error():
		return doc, fail(exitUsage, "%s", doc.Problem)
	}
	return doc, fail(exitFailure, "%s", doc.Problem)
}

func (a *app) vaultSet(ctx context.Context, f *vaultFlags, name string) error {
	if !secretName(name) {
		return fail(exitUsage, "%w", errBadSecretName)
	}
	value, err := a.secretInput(name)
	if err != nil {
		return err
	}
	defer clear(value)
	doc, done, err := a.throughProxy(ctx, f, http.MethodPut, "/secrets/"+url.PathEscape(name), value)
	if err != nil {
		return err
	}
	if !done {
		v, err := a.unlockedVault(f)
		if err != nil {
			return err
		}
		if err := storeSecret(v, name, value); err != nil {
			return a.vaultError(err)
		}
		if doc.Secrets, err = v.List(); err != nil {
			return a.vaultError(err)
		}
	}
	return a.vaultDone(f, doc, name+": stored")
}

// secretInput reads a secret from a pipe whole, or from a terminal without echo.
func (a *app) secretInput(name string) ([]byte, error) {
	if in, ok := a.stdin.(*os.File); ok && term.IsTerminal(int(in.Fd())) {
		_, _ = fmt.Fprintf(a.stderr, "Value of %s: ", name)
		b, err := term.ReadPassword(int(in.Fd()))
		_, _ = fmt.Fprintln(a.stderr)
		if err != nil {
			return nil, fail(exitUsage, "no value was given")
		}
		return b, nil
	}
	b, err := io.ReadAll(io.LimitReader(a.stdin, inject.MaxSecretBytes+3))
	if err != nil {
		return nil, fail(exitUsage, "standard input: %w", err)
	}
	return b, nil
}

func (a *app) vaultList(ctx context.Context, f *vaultFlags) error {
	doc, done, err := a.throughProxy(ctx, f, http.MethodGet, "", nil)
	if err != nil {
		return err
	}
	if !done {
		v, err := a.unlockedVault(f)
		if err != nil {
			return err
		}
		if doc.Secrets, err = v.List(); err != nil {
			return a.vaultError(err)
		}
		doc.Locked = false
		doc.Method, _ = v.Method()
	}
	if doc.Secrets == nil {
		doc.Secrets = []vault.Item{}
	}
	if f.asJSON {
		return printJSON(a.stdout, doc)
	}
	t := table{head: []string{"NAME", "CHANGED", "VALUES"}}
	for _, s := range doc.Secrets {
		t.add(s.Name, s.Changed.Format(time.DateTime), fmt.Sprint(s.Serial))
	}
	return t.print(a.stdout, newStyler(a, a.stdout))
}

func (a *app) vaultRemove(ctx context.Context, f *vaultFlags, name string) error {
	doc, done, err := a.throughProxy(ctx, f, http.MethodDelete, "/secrets/"+url.PathEscape(name), nil)
	if err != nil {
		return err
	}
	if !done {
		v, err := a.unlockedVault(f)
		if err != nil {
			return err
		}
		if err := v.Remove(name); err != nil {
			return a.vaultError(err)
		}
	}
	return a.vaultDone(f, doc, name+": removed")
}

func (a *app) vaultUnlock(ctx context.Context, f *vaultFlags) error {
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	in := unlockRequest{}
	if f.identity != "" {
		if in.Identity, err = filepath.Abs(f.identity); err != nil {
			return fail(exitUsage, "--identity: %w", err)
		}
	}
	method, err := openVault(data).Method()
	if err != nil {
		return a.vaultError(err)
	}
	if method == vault.MethodPassphrase {
		if in.Passphrase, err = a.passphrase(f, false); err != nil {
			return err
		}
	}
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	return a.vaultTell(ctx, f, "/unlock", body)
}

// vaultTell sends lock or unlock to the running proxy.
func (a *app) vaultTell(ctx context.Context, f *vaultFlags, path string, body []byte) error {
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	client, err := a.running(ctx, data)
	if errors.Is(err, errNotRunning) {
		return fail(exitUnavailable, "no proxy runs with the data folder %s: there is nothing to lock or unlock", data)
	}
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	doc, err := client.vault(ctx, http.MethodPost, path, body)
	if err != nil {
		return err
	}
	word := "unlocked"
	if doc.Locked {
		word = "locked"
	}
	return a.vaultDone(f, doc, word)
}
