package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// The states of a finding. Only failed ones change the exit code.
const (
	findingOK   = "ok"
	findingWarn = "warn"
	findingFail = "fail"
	findingSkip = "skip" // could not be looked at, and nothing depends on it
)

// finding is one thing that was looked at. Neither text holds a secret.
type finding struct {
	Check  string `json:"check"`
	Status string `json:"status"`
	What   string `json:"what"`
	Fix    string `json:"fix,omitempty"`
}

// doctorDocument is what "waybill doctor --json" prints.
type doctorDocument struct {
	OK       bool      `json:"ok"`
	Version  buildInfo `json:"version"`
	Config   string    `json:"config"`
	Data     string    `json:"data"`
	Findings []finding `json:"findings"`
}

// doctor looks at this machine. It changes nothing that lasts.
type doctor struct {
	a       *app
	data    string
	cfg     *loadedConfig // nil: there is none that could be used
	status  *proxyStatus  // nil: no proxy runs
	anyFS   bool
	offline bool          // no loop, no clients
	fetch   bool          // secrets of stores elsewhere, too
	limit   time.Duration // of one client
	doc     doctorDocument
}

func (d *doctor) add(check, status, fix, format string, args ...any) {
	d.doc.Findings = append(d.doc.Findings, finding{Check: check, Status: status, What: fmt.Sprintf(format, args...), Fix: fix})
	if status == findingFail {
		d.doc.OK = false
	}
}

func newDoctor(a *app) *cobra.Command {
	var (
		asJSON bool
		d      doctor
	)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Test this machine and its clients, and say how to repair what is wrong",
		Long: `Test this machine and its clients: configuration and credentials, data folder and
file system, how fast a sync is, free space, clock, ports, the CA, proxy variables
that contradict each other; then a whole request through a proxy of its own to an
upstream of its own on loopback; then the same request by each client that is
found here (curl, wget, git, Python, Node, Java, Go) with the variables that
"waybill run" sets. A client of which the proxy saw nothing fails.

Nothing leaves the machine (but with --credentials), and nothing is left behind.
Secrets are looked for, never shown.

The exit code is 0 when nothing failed (warnings may be left), else 1.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d.a = a
			if err := d.run(cmd.Context()); err != nil {
				return err
			}
			return d.print(asJSON)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "print JSON")
	f.BoolVar(&d.offline, "no-clients", false, "send no request and start no client")
	f.BoolVar(&d.fetch, "credentials", false, "fetch every secret from where it comes from, as \"waybill check --credentials\" does")
	f.DurationVar(&d.limit, "timeout", 20*time.Second, "how long one client may take")
	f.BoolVar(&d.anyFS, allowAnyFilesystem, false, "a file system that serve would refuse is a warning; see waybill serve --help")
	return cmd
}

func (d *doctor) run(ctx context.Context) error {
	data, err := d.a.dataDir()
	if err != nil {
		return err
	}
	d.data = data
	d.doc = doctorDocument{OK: true, Version: readBuildInfo(), Config: d.a.configPath(), Data: data, Findings: []finding{}}
	d.checkConfig(ctx)
	d.findProxy(ctx)
	d.checkData()
	d.checkClock()
	d.checkListeners()
	d.checkCA()
	d.checkVariables()
	if !d.offline {
		d.checkLoop(ctx)
	}
	return nil
}

func (d *doctor) print(asJSON bool) error {
	if asJSON {
		if err := printJSON(d.a.stdout, d.doc); err != nil {
			return err
		}
	} else if err := d.printText(); err != nil {
		return err
	}
	if !d.doc.OK {
		return exitWith(exitFailure)
	}
	return nil
}

func (d *doctor) printText() error {
	s := newStyler(d.a, d.a.stdout)
	colour := map[string]string{findingOK: green, findingWarn: yellow, findingFail: red}
	p := &errWriter{w: d.a.stdout}
	count := map[string]int{}
	width := 0
	for _, f := range d.doc.Findings {
		width = max(width, len(f.Check))
	}
	for _, f := range d.doc.Findings {
		count[f.Status]++
		p.printf("%s %-*s  %s\n", s.paint(colour[f.Status], fmt.Sprintf("%-4s", f.Status)), width, f.Check, printable(f.What))
		if f.Fix != "" {
			p.printf("     %-*s  fix: %s\n", width, "", printable(f.Fix))
		}
	}
	p.printf("%d failed, %s, %d good\n", count[findingFail], plural(count[findingWarn], "warning"), count[findingOK])
	return p.err
}

// checkConfig looks at the configuration and the secrets it names.
func (d *doctor) checkConfig(ctx context.Context) {
	path := d.a.configPath()
	own, err := d.a.vaultForCheck(d.fetch)
	if err != nil {
		d.add("vault", findingWarn, "waybill vault unlock", "%s", vaultProblem(err))
	}
	cfg, warnings, err := loadFile(path, own)
	switch {
	case err != nil && noFile(err):
		d.add("config", findingWarn, `write a first one with "waybill init", or give --config FILE`, "there is no configuration at %s", path)
		return
	case err != nil:
		d.add("config", findingFail, `correct it; "waybill check" lists every mistake with its place`, "%s", configText(err))
		return
	}
	d.cfg = cfg
	d.add("config", findingOK, "", "%s: %s, snapshot %s", path, plural(len(cfg.snapshot.Routes()), "route"), cfg.snapshot.Digest())
	for _, w := range warnings {
		d.add("config", findingWarn, w.Fix, "%s: %s", w.Path, w.What)
	}
	ids := cfg.credentials.IDs()
	bad := checkSecrets(ctx, path, cfg, d.fetch)
	for _, p := range bad {
		d.add("credentials", findingFail, p.Fix, "%s: %s", strings.TrimPrefix(p.Path, "credentials."), p.What)
	}
	if len(bad) == 0 && len(ids) > 0 {
		which := "those of files and variables can be used; --credentials asks the stores, too"
		if d.fetch {
			which = "all can be used"
		}
		d.add("credentials", findingOK, "", "%s: %s", plural(len(ids), "credential"), which)
	}
}

// findProxy looks for the running proxy.
func (d *doctor) findProxy(ctx context.Context) {
	client, err := d.a.running(ctx, d.data)
	switch {
	case errors.Is(err, errNotRunning):
		return
	case err != nil:
		d.add("proxy", findingFail, "see whether --data is the proxy's and whether you are its user", "%s", err.Error())
		return
	}
	defer func() { _ = client.Close() }()
	st, err := client.status(ctx)
	if err != nil {
		d.add("proxy", findingFail, `start it again, or run the command of the same version`, "%s", err.Error())
		return
	}
	d.status = &st
	for _, p := range st.problems() {
		d.add("proxy", p.Status, p.Fix, "%s", p.What)
	}
	if mine := readBuildInfo().Version; st.Version != mine {
		d.add("proxy", findingWarn, "start the proxy again with the new program", "the running proxy is version %s, this command is %s", st.Version, mine)
	}
	if d.cfg != nil && st.Snapshot != d.cfg.snapshot.Digest() {
		d.add("proxy", findingWarn, "waybill check; the log of the proxy says why it kept the old one", "the running proxy does not use the configuration that is in the file")
	}
}

// existing is the folder or its nearest parent that exists.
func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); err == nil || filepath.Dir(dir) == dir {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

func (d *doctor) checkCA() {
	certFile, keyFile := filepath.Join(d.data, "ca", "ca.pem"), filepath.Join(d.data, "ca", "ca-key.pem")
	_, certErr := os.Stat(certFile)
	_, keyErr := os.Stat(keyFile)
	if noFile(certErr) && noFile(keyErr) {
		d.add("ca", findingWarn, `"waybill init" or the first start makes it`, "there is no CA yet; the clients below are tested with one made for this test")
		return
	}
	if _, err := ensureCA(d.data); err != nil {
		d.add("ca", findingFail, "put both files back from a backup, or remove both: the next start makes a new CA, which every client has to trust anew", "%s", err.Error())
		return
	}
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil || pair.Leaf == nil {
		d.add("ca", findingFail, "see whether you may read it", "%s cannot be read", certFile)
		return
	}
	left := time.Until(pair.Leaf.NotAfter)
	switch {
	case time.Now().Before(pair.Leaf.NotBefore):
		d.add("ca", findingFail, "set the clock", "the CA is not valid yet: it begins at %s", pair.Leaf.NotBefore.UTC().Format(time.RFC3339))
	case left < 30*24*time.Hour:
		d.add("ca", findingWarn, "remove ca.pem and ca-key.pem, start the proxy again, and hand the new certificate out: waybill ca export", "the CA ends at %s", pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	default:
		d.add("ca", findingOK, "", "%s, valid until %s", pair.Leaf.Subject.CommonName, pair.Leaf.NotAfter.UTC().Format("2006-01-02"))
	}
}
