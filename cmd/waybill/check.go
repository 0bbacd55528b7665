package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"waybill/internal/config"
)

// checkedProblem is one problem in "waybill check --json".
type checkedProblem struct {
	File    string `json:"file"`
	Line    int    `json:"line"`
	Column  int    `json:"column"`
	Path    string `json:"path"`
	Message string `json:"message"`
	Fix     string `json:"fix,omitempty"`
}

// checkDocument is what "waybill check --json" prints.
type checkDocument struct {
	OK       bool             `json:"ok"`
	File     string           `json:"file"`
	Errors   []checkedProblem `json:"errors"`
	Warnings []checkedProblem `json:"warnings"`
	Snapshot string           `json:"snapshot,omitempty"`
	Routes   int              `json:"routes"`
}

func newCheck(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Validate the configuration; every mistake at once, with its place",
		Long: `Validate the configuration file: every mistake at once, as
file:line:column field.path: what is wrong; what to do.

Secrets are not read, nothing is dialled. The exit code is 3 when the
configuration would be refused.`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			path := a.configPath()
			doc := checkDocument{File: path, Errors: []checkedProblem{}, Warnings: []checkedProblem{}}
			cfg, warnings, err := loadFile(path)
			var problems config.Errors
			switch {
			case errors.As(err, &problems):
				doc.Errors = checked(problems)
			case err != nil:
				if !asJSON {
					return configError(path, err)
				}
				doc.Errors = []checkedProblem{{File: path, Path: "document", Message: err.Error()}}
			default:
				doc.OK, doc.Snapshot, doc.Routes = true, cfg.snapshot.Digest(), len(cfg.snapshot.Routes())
			}
			doc.Warnings = checked(warnings)
			return a.printCheck(doc, problems, warnings, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) printCheck(doc checkDocument, problems, warnings []config.Problem, asJSON bool) error {
	if asJSON {
		if err := printJSON(a.stdout, doc); err != nil {
			return err
		}
	} else {
		p := &errWriter{w: a.stderr}
		for _, w := range warnings {
			p.printf("%s (warning)\n", w)
		}
		for _, e := range problems {
			p.printf("%s\n", e)
		}
		if p.err != nil {
			return p.err
		}
		if doc.OK {
			_, err := fmt.Fprintf(a.stdout, "%s: good, %s, snapshot %s\n", doc.File, plural(doc.Routes, "route"), doc.Snapshot)
			return err
		}
		_, _ = fmt.Fprintf(a.stderr, "%s: %s\n", doc.File, plural(len(problems), "mistake"))
	}
	if !doc.OK {
		return exitWith(exitConfig)
	}
	return nil
}

func checked(list []config.Problem) []checkedProblem {
	out := make([]checkedProblem, len(list))
	for i, p := range list {
		out[i] = checkedProblem{File: p.File, Line: p.Line, Column: p.Column, Path: p.Path, Message: p.What, Fix: p.Fix}
	}
	return out
}

// configError says what to do when there is no file.
func configError(path string, err error) error {
	if noFile(err) {
		return fail(exitConfig, "no configuration at %s; write a first one with \"waybill init\", or give --config FILE", path)
	}
	return fail(exitConfig, "%w", err)
}
