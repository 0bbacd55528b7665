package main

import (
	"bytes"
	"encoding/pem"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

func newCA(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ca",
		Short: "Hand out the certificate of the interception CA",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCAExport(a))
	return cmd
}

func newCAExport(a *app) *cobra.Command {
	var bundle, roots string
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Write the CA's certificate, never its key",
		Long: `Write the certificate of the interception CA to standard output, or with --bundle
to a file that programs can use as their list of trusted CAs. --roots adds the
certificates of a file, for programs that also talk to others without the proxy.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			data, err := a.dataDir()
			if err != nil {
				return err
			}
			return a.exportCA(filepath.Join(data, "ca", "ca.pem"), bundle, roots)
		},
	}
	cmd.Flags().StringVar(&bundle, "bundle", "", "`file` to write, with mode 0644")
	cmd.Flags().StringVar(&roots, "roots", "", "`file` of further certificates")
	_ = cmd.MarkFlagFilename("bundle")
	_ = cmd.MarkFlagFilename("roots")
	return cmd
}

func (a *app) exportCA(path, bundle, roots string) error {
	out, err := certificatesOf(path)
	if err != nil {
		return err
	}
	if roots != "" {
		more, err := certificatesOf(roots)
		if err != nil {
			return err
		}
		out = append(out, more...)
	}
	if bundle == "" {
		_, err = a.stdout.Write(out)
		return err
	}
	// In one step: a program that starts meanwhile must not see half of it. Certificates are
	// for everybody.
	if err := replaceFile(bundle, 0o644, out); err != nil {
		return fail(exitFailure, "--bundle: %w", err)
	}
	return nil
}

// certificatesOf reads the certificates of a PEM file and nothing else that may be in it.
func certificatesOf(path string) ([]byte, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fail(exitConfig, "certificates: %w; \"waybill init\" or the first start makes the CA", err)
	}
	var out bytes.Buffer
	for rest := data; ; {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		if b.Type == "CERTIFICATE" {
			_ = pem.Encode(&out, &pem.Block{Type: b.Type, Bytes: b.Bytes})
		}
	}
	if out.Len() == 0 {
		return nil, fail(exitConfig, "%s: holds no certificate", path)
	}
	return out.Bytes(), nil
}
