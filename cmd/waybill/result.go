package main

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"waybill/dispatch"
)

// resultDocument is what "waybill result ID --json" prints. Body is set for
// UTF-8 text, BodyBase64 for everything else.
type resultDocument struct {
	Status     int         `json:"status"`
	Header     http.Header `json:"header"`
	Bytes      int         `json:"bytes"`
	Digest     string      `json:"digest"` // "sha256:…" of the body
	Body       *string     `json:"body,omitempty"`
	BodyBase64 string      `json:"body_base64,omitempty"`
}

func newResult(a *app) *cobra.Command {
	var (
		include, asJSON bool
		output          string
	)
	cmd := &cobra.Command{
		Use:   "result ID",
		Short: "Print the stored result of an action",
		Long: `Print the body of an action's stored result. Reading never executes anything
(CONTRACT H3) and may be repeated.

Without a complete result nothing is printed on standard output: the action's
envelope goes to standard error, and the exit code is 5.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeIDs(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := parseID(args[0])
			if err != nil {
				return err
			}
			return withReader(cmd.Context(), a, func(r reader) error {
				res, err := r.Result(cmd.Context(), id)
				var none *noResultError
				if errors.As(err, &none) {
					return noResult(a, none, asJSON)
				}
				if err != nil {
					return err
				}
				defer func() { _ = res.Body.Close() }()
				write := func(w io.Writer) error { return writeResult(w, a.stderr, res, include, asJSON) }
				if output == "" || output == "-" {
					return write(a.stdout)
				}
				return writeWhole(output, write)
			})
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&include, "include", "i", false, "print status line and header fields before the body")
	f.StringVarP(&output, "output", "o", "", "write to this `file`; it appears only when the result is whole")
	f.BoolVar(&asJSON, "json", false, "print JSON: status, header, digest and body")
	cmd.MarkFlagsMutuallyExclusive("include", "json")
	return cmd
}

func noResult(a *app, none *noResultError, asJSON bool) error {
	w := a.stderr
	if asJSON {
		w = a.stdout
	}
	if err := printJSON(w, none.Envelope); err != nil {
		return err
	}
	return exitWith(exitNoResult)
}

func writeResult(w, errs io.Writer, res *storedResult, include, asJSON bool) error {
	if asJSON {
		body, err := io.ReadAll(res.Body)
		if err != nil {
			return fail(exitFailure, "stored result: %w; nothing was printed", err)
		}
		sum := sha256.Sum256(body)
		doc := resultDocument{Status: res.Status, Header: res.Header, Bytes: len(body), Digest: "sha256:" + hex.EncodeToString(sum[:])}
		if utf8.Valid(body) {
			text := string(body)
			doc.Body = &text
		} else {
			doc.BodyBase64 = base64.StdEncoding.EncodeToString(body)
		}
		return printJSON(w, doc)
	}
	if include {
		if _, err := fmt.Fprintf(w, "HTTP/1.1 %d %s\r\n", res.Status, http.StatusText(res.Status)); err != nil {
			return err
		}
		for _, name := range slices.Sorted(maps.Keys(res.Header)) {
			for _, v := range res.Header[name] {
				if _, err := fmt.Fprintf(w, "%s: %s\r\n", name, v); err != nil {
					return err
				}
			}
		}
		if _, err := io.WriteString(w, "\r\n"); err != nil {
			return err
		}
	}
	if res.Header.Get("Content-Type") == dispatch.OutputMediaType && !include {
		// A command's: each stream goes where it came from.
		if err := dispatch.SplitOutput(res.Body, w, errs); err != nil {
			return fail(exitFailure, "stored result: %w; what was printed is not the whole result", err)
		}
		return nil
	}
	if _, err := io.Copy(w, res.Body); err != nil {
		return fail(exitFailure, "stored result: %w; what was printed is not the whole result", err)
	}
	return nil
}

// writeWhole writes path through a temporary file beside it, so that a broken
// result never looks like a file.
func writeWhole(path string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".waybill-result-*")
	if err != nil {
		return fail(exitFailure, "-o %s: %w", path, err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	if err := write(f); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return fail(exitFailure, "-o %s: %w", path, err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fail(exitFailure, "-o %s: %w", path, err)
	}
	return nil
}
