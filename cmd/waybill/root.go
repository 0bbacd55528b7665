package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"waybill/inject/vault"
)

// app is one invocation of the program.
type app struct {
	stdin   io.Reader
	stdout  io.Writer
	stderr  io.Writer
	environ []string // as the process was started with it

	configFlag string
	dataFlag   string
	adminFlag  string

	vault *vault.Vault // of the proxy that runs in this process; nil: none
	// refreshed is told of every renewal of a credential; nil: nobody is.
	refreshed func(credential string, ok bool)

	entered bool // the command line was understood; later errors are not about usage
}

func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "waybill",
		Short: "Carries agents' requests, attaches the secrets they must not hold, and proves what happened to each",
		Long: `Waybill is a forward HTTP proxy for agents. It attaches the secrets that agents
must not hold, and its journal proves for each request where it stopped and
what is known about the remote side.

First steps:
  waybill demo                     see every outcome; no configuration, no network
  waybill init                     write a first waybill.yaml and a CA
  waybill run -- curl https://…    run a program through the proxy
  waybill actions                  read what happened`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		PersistentPreRun: func(*cobra.Command, []string) {
			a.entered = true
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(a.stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	pf := root.PersistentFlags()
	pf.StringVar(&a.configFlag, "config", "", "configuration `file` (default $WAYBILL_CONFIG, else waybill.yaml)")
	pf.StringVar(&a.dataFlag, "data", "", "data `folder` (default $WAYBILL_DATA, else $XDG_STATE_HOME/waybill)")
	pf.StringVar(&a.adminFlag, "admin", "", "admin socket as unix:`path` (default listen.admin, else unix:<data>/admin.sock)")
	_ = root.MarkPersistentFlagFilename("config", "yaml", "yml")
	_ = root.MarkPersistentFlagDirname("data")
	root.AddGroup(
		&cobra.Group{ID: "start", Title: "Carry requests:"},
		&cobra.Group{ID: "read", Title: "Read what happened:"},
		&cobra.Group{ID: "act", Title: "Act on one action:"},
		&cobra.Group{ID: "setup", Title: "Set up and check:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("start", newServe(a), newRun(a), newConnect(a), newMCP(a), newDemo(a))
	add("read", newActions(a), newAction(a), newResult(a), newTail(a), newSessions(a), newJournal(a), newAudit(a))
	add("act", newRetry(a), newAck(a), newReconcile(a), newAttest(a), newApprovals(a), newApprove(a), newDeny(a))
	add("setup", newInit(a), newCheck(a), newExplain(a), newPresets(a), newVault(a), newEnv(a), newSSHConfig(a), newVersion(a))
	root.SetCompletionCommandGroupID("setup")
	root.SetHelpCommandGroupID("setup")
	addOperations(a, root)
	return root
}

// getenv reads the environment that the process was started with.
func (a *app) getenv(name string) string { return lookup(a.environ, name) }

// lookup returns the last value of name in environ, as exec does.
func lookup(environ []string, name string) string {
	v, _ := lookupOK(environ, name)
	return v
}

func lookupOK(environ []string, name string) (string, bool) {
	for i := len(environ) - 1; i >= 0; i-- {
		if k, v, ok := strings.Cut(environ[i], "="); ok && k == name {
			return v, true
		}
	}
	return "", false
}

// configPath is the configuration file: flag, WAYBILL_CONFIG, waybill.yaml here.
func (a *app) configPath() string {
	if a.configFlag != "" {
		return a.configFlag
	}
	if v := a.getenv("WAYBILL_CONFIG"); v != "" {
		return v
	}
	return "waybill.yaml"
}

// dataDir is the data folder as an absolute path: flag, WAYBILL_DATA,
// $XDG_STATE_HOME/waybill, ~/.local/state/waybill.
func (a *app) dataDir() (string, error) {
	dir := a.dataFlag
	if dir == "" {
		dir = a.getenv("WAYBILL_DATA")
	}
	if dir == "" {
		state := a.getenv("XDG_STATE_HOME")
		// The XDG base directory specification: a relative path is invalid and ignored.
		if !filepath.IsAbs(state) {
			home := a.getenv("HOME")
			if home == "" {
				return "", fail(exitUsage, "no data folder: HOME is not set; give --data FOLDER or WAYBILL_DATA")
			}
			state = filepath.Join(home, ".local", "state")
		}
		dir = filepath.Join(state, "waybill")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", fail(exitFailure, "data folder %s: %w", dir, err)
	}
	return abs, nil
}

// makeDataDir makes the data folder with mode 0700 and refuses one that others
// may enter: it holds the journal's key and the CA's.
func makeDataDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fail(exitConfig, "data folder: %w; choose another with --data or WAYBILL_DATA", err)
	}
	st, err := os.Stat(dir)
	if err != nil {
		return fail(exitConfig, "data folder: %w", err)
	}
	if !st.IsDir() {
		return fail(exitConfig, "data folder %s: not a folder; choose another with --data or WAYBILL_DATA", dir)
	}
	if perm := st.Mode().Perm(); perm&0o077 != 0 {
		return fail(exitConfig, "data folder %s: mode %#o lets other users in; run: chmod 700 %s", dir, perm, dir)
	}
	return nil
}

// adminPath is the admin socket. configured is listen.admin, or "".
func (a *app) adminPath(data, configured string) (string, error) {
	s := a.adminFlag
	if s == "" {
		s = configured
	}
	if s == "" {
		return filepath.Join(data, "admin.sock"), nil
	}
	path, ok := strings.CutPrefix(s, "unix:")
	if !ok || path == "" {
		return "", fail(exitUsage, "--admin %s: only a unix socket is available in this version; write unix:PATH", s)
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(data, path)
	}
	return path, nil
}

// printJSON writes v as one indented JSON document.
func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// printLine writes v as one JSON line.
func printLine(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// noFile reports whether err says that a file is missing.
func noFile(err error) bool { return errors.Is(err, os.ErrNotExist) }

// plural is for people: "1 action", "2 actions".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
