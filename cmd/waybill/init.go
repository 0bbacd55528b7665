package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"waybill/configs"
	"waybill/proxy"
)

// initDocument is what "waybill init --json" prints.
type initDocument struct {
	Config string `json:"config"`
	Schema string `json:"schema"` // for editors; named in the configuration's first line
	Data   string `json:"data"`
	CA     string `json:"ca"`
	Bundle string `json:"bundle"` // system roots and ours
	// SSHKnownHosts holds the @cert-authority line of the SSH endpoint.
	SSHKnownHosts string `json:"ssh_known_hosts"`
}

func newInit(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Write a first waybill.yaml, and make the data folder and the CA",
		Long: `Write a commented first configuration, and make the data folder (mode 0700) and
the CA whose certificates intercepted clients see. A configuration file that is
there is never overwritten; a data folder and CA that are there are kept.

The CA is not installed anywhere: "waybill run" and "waybill env" make single
programs trust it. Whoever holds <data>/ca/ca-key.pem can impersonate every site
to them.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			doc, err := a.initialise()
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(a.stdout, doc)
			}
			p := &errWriter{w: a.stdout}
			p.printf("configuration  %s\ndata folder    %s\nCA             %s\nCA bundle      %s (system roots and ours)\nSSH CA         %s (waybill ssh-config)\n\n", doc.Config, doc.Data, doc.CA, doc.Bundle, doc.SSHKnownHosts)
			p.printf("Next:\n")
			p.printf("  1. put a secret where a credential of %s reads it, and name the hosts in its routes\n", doc.Config)
			p.printf("  2. waybill check\n")
			p.printf("  3. waybill run -- curl https://…\n")
			return p.err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) initialise() (initDocument, error) {
	var doc initDocument
	path, err := filepath.Abs(a.configPath())
	if err != nil {
		return doc, fail(exitFailure, "init: %w", err)
	}
	if _, err := os.Lstat(path); err == nil {
		return doc, alreadyThere(path)
	}
	data, err := a.dataDir()
	if err != nil {
		return doc, err
	}
	if err := makeDataDir(data); err != nil {
		return doc, err
	}
	ca, err := ensureCA(data)
	if err != nil {
		return doc, err
	}
	if _, err := ensureSSHCA(data); err != nil {
		return doc, err
	}
	bundle, err := writeCABundle(ca)
	if err != nil {
		return doc, fail(exitFailure, "init: %w", err)
	}
	if err := writeNew(path, configs.Example); err != nil {
		return doc, err
	}
	schema := filepath.Join(filepath.Dir(path), "waybill.schema.json")
	if _, err := os.Lstat(schema); err != nil {
		if err := writeNew(schema, configs.ConfigSchema); err != nil {
			return doc, err
		}
	}
	return initDocument{Config: path, Schema: schema, Data: data, CA: ca, Bundle: bundle, SSHKnownHosts: filepath.Join(sshFolder(data), proxy.SSHKnownHostsFile)}, nil
}

// writeNew writes a file that must not be there: whatever came in between is not
// overwritten either.
func writeNew(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return alreadyThere(path)
	}
	if err != nil {
		return fail(exitFailure, "init: %w", err)
	}
	if _, err = f.Write(data); err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fail(exitFailure, "init: %w", err)
	}
	return nil
}

func alreadyThere(path string) error {
	return fail(exitFailure, "init: %s is there already and is not overwritten; choose another with --config, or check it with \"waybill check\"", path)
}

// ensureCA makes the CA of a data folder if it has none, and returns the path of
// its certificate.
func ensureCA(data string) (string, error) {
	dir := filepath.Join(data, "ca")
	if _, err := proxy.LoadOrCreateCA(dir); err != nil {
		return "", fail(exitConfig, "%w", err)
	}
	return filepath.Join(dir, "ca.pem"), nil
}

// writeCABundle writes bundle.pem beside the CA certificate, for clients that are
// configured by hand.
func writeCABundle(caFile string) (string, error) {
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(caFile), "bundle.pem")
	if err := writeFile(path, 0o644, joinPEM(systemRoots(), ca)); err != nil {
		return "", fmt.Errorf("CA bundle: %w", err)
	}
	return path, nil
}
