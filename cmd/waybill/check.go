package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/inject"
	"waybill/inject/vault"
	"waybill/internal/config"
	"waybill/outcome"
	"waybill/routes"
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
	// Presets are the routes that come from a preset, and what the file changed of them.
	Presets []usedPreset `json:"presets,omitempty"`
	// Proxies are the routes that go through an upstream proxy.
	Proxies []usedProxy `json:"proxies,omitempty"`
}

// usedProxy is a route and its upstream proxy, without user and password.
type usedProxy struct {
	Route string `json:"route"`
	Proxy string `json:"proxy"`
}

func newCheck(a *app) *cobra.Command {
	var asJSON, fetch bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Validate the configuration; every mistake at once, with its place",
		Long: `Validate the configuration file: every mistake at once, as
file:line:column field.path: what is wrong; what to do.

Nothing is dialled. A secret in a file or an environment variable that is not there,
or cannot be used, is a warning. With --credentials every secret is fetched from where it
comes from, and one that cannot be used counts as a mistake. The exit code is 3 when
the configuration would be refused.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path := a.configPath()
			if fetch {
				ignoreEnvironment(slog.New(slog.DiscardHandler)) // as the proxy does
			}
			doc := checkDocument{File: path, Errors: []checkedProblem{}, Warnings: []checkedProblem{}}
			own, err := a.vaultForCheck(fetch)
			if err != nil {
				return err
			}
			cfg, warnings, err := loadFile(path, own)
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
				doc.Presets = cfg.presetsInUse()
				for _, r := range cfg.snapshot.Routes() {
					if p := r.Upstream.Proxy; p != nil {
						doc.Proxies = append(doc.Proxies, usedProxy{r.Name, p.Origin()})
					}
				}
				warnings = append(warnings, shortSecrets(cmd.Context(), path, cfg, fetch)...)
				found := checkSecrets(cmd.Context(), path, cfg, fetch)
				if fetch {
					problems = append(problems, found...)
					doc.Errors, doc.OK = checked(found), len(found) == 0
				} else {
					warnings = append(warnings, found...)
				}
			}
			doc.Warnings = checked(warnings)
			return a.printCheck(doc, problems, warnings, asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&fetch, "credentials", false, "fetch every secret, and count those that cannot be used")
	return cmd
}

// vaultForCheck opens the vault as a proxy would; without need of it there is none.
func (a *app) vaultForCheck(fetch bool) (*vault.Vault, error) {
	if !fetch {
		return nil, nil //nolint:nilnil // not asked
	}
	data, err := a.dataDir()
	if err != nil {
		return nil, err
	}
	v := openVault(data)
	_ = v.Unlock("", "") // locked is what its secrets say then
	return v, nil
}

// checkSecrets says which secrets cannot be used now, by their credential. Without all
// only those are looked at that are on this machine and need nobody (CONTRACT C2: neither
// value nor place of a byte beyond its position).
func checkSecrets(ctx context.Context, path string, cfg *loadedConfig, all bool) []config.Problem {
	var out []config.Problem
	for _, e := range cfg.credentials.Check(ctx, func(kind string) bool {
		return all || onThisMachine(kind)
	}) {
		what := "the secret cannot be used: " + e.Code.String() + ", " + e.Reason
		if e.Position > 0 {
			what += fmt.Sprintf(" at byte %d", e.Position)
		}
		out = append(out, config.Problem{File: path, Line: 1, Column: 1, Path: "credentials." + e.ID, What: what, Fix: secretFix(e)})
	}
	return out
}

// shortSecrets says which routes send a value that is too short for answers to be searched
// for it (CONTRACT C5). Secrets are looked at as by checkSecrets.
func shortSecrets(ctx context.Context, path string, cfg *loadedConfig, all bool) []config.Problem {
	var out []config.Problem
	for _, r := range cfg.snapshot.Routes() {
		for i := range r.Inject {
			in := &r.Inject[i]
			kind := cfg.credentials.Kind(in.Credential)
			if kind == "" || !all && !onThisMachine(kind) {
				continue
			}
			before := ""
			switch in.Kind {
			case routes.InjectHeader, routes.InjectBody:
			case routes.InjectCookie, routes.InjectQuery:
				before = in.Name + "="
			case routes.InjectHMAC, routes.InjectSigV4, routes.InjectClientCertificate:
				continue // what is sent is made of the secret, and long
			}
			template, err := inject.ParseTemplate(in.Value)
			if err != nil {
				continue
			}
			got, err := cfg.credentials.Resolve(ctx, in.Credential)
			if err != nil {
				continue // checkSecrets says so
			}
			value, err := template.Render(got.Secret)
			got.Secret.Zero()
			if err == nil && len(before)+len(value) < dispatch.MinSearchedBytes {
				out = append(out, config.Problem{File: path, Line: 1, Column: 1, Path: "credentials." + in.Credential,
					What: fmt.Sprintf("route %s sends a value of fewer than %d bytes: answers are not searched for one so short, which is found by chance", r.Name, dispatch.MinSearchedBytes),
					Fix:  "have the service issue a longer secret"})
			}
		}
	}
	return out
}

func secretFix(e *inject.Error) string {
	switch e.Code {
	case outcome.CodeCredentialMissing:
		if e.Kind == inject.KindEnv {
			return "set the variable that its from: {env: …} names, where the proxy is started; requests that need it are refused until then"
		}
		return "put it where " + e.Kind + " says; requests that need it are refused until then"
	case outcome.CodeVaultLocked:
		return "waybill vault unlock"
	case outcome.CodeCredentialRefused:
		return "give Waybill the right to read it, or correct what it logs in with"
	case outcome.CodeCredentialUnavailable:
		return "see whether the store can be reached from here"
	}
	return "store it again, as one line of printable ASCII"
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
			for i := range doc.Presets {
				if _, err := fmt.Fprintf(a.stdout, "route %s: from %s\n", doc.Presets[i].Route, presetLine(&doc.Presets[i].PresetUse)); err != nil {
					return err
				}
			}
			for _, u := range doc.Proxies {
				if _, err := fmt.Fprintf(a.stdout, "route %s: through %s\n", u.Route, u.Proxy); err != nil {
					return err
				}
			}
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
