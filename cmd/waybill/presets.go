package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"waybill/internal/config"
)

// listedPreset is a preset in "waybill presets --json" and "presets show NAME --json".
type listedPreset struct {
	Preset       string                   `json:"preset"` // as it is written after use:
	Title        string                   `json:"title"`
	Reviewed     string                   `json:"reviewed"`
	Parts        []string                 `json:"parts"`
	With         []config.PresetParameter `json:"with"`
	Credentials  []string                 `json:"credentials"` // roles; empty: one secret
	Placeholders map[string]string        `json:"placeholders"`
	Facts        []config.Fact            `json:"facts,omitempty"` // show only
	File         string                   `json:"file,omitempty"`  // show only
}

func listed(p *config.Preset, whole bool) listedPreset {
	l := listedPreset{Preset: "preset/" + p.Name, Title: p.Title, Reviewed: p.Reviewed, Parts: p.Parts,
		With: append([]config.PresetParameter{}, p.With...), Credentials: append([]string{}, p.Credentials...), Placeholders: p.Placeholders}
	if l.Placeholders == nil {
		l.Placeholders = map[string]string{}
	}
	if whole {
		l.Facts, l.File = p.Facts, p.Text
	}
	return l
}

func newPresets(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "presets",
		Short: "List the presets: what is known of an API, ready for use in a route",
		Long: `List the presets. A route that says "use: preset/stripe" stands for what is known
of that API: where the secret goes, which key makes a repeat safe and for how long,
what client libraries expect of an error. "waybill presets show NAME" prints one, with
the source of every claim.`,
		Example: "  waybill presets show stripe",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if asJSON {
				list := []listedPreset{}
				for _, p := range config.Presets() {
					list = append(list, listed(p, false))
				}
				return printJSON(a.stdout, list)
			}
			t := table{head: []string{"USE", "API", "PARTS", "ASKS FOR", "REVIEWED"}}
			for _, p := range config.Presets() {
				var asks []string
				for _, q := range p.With {
					if q.Default == "" {
						asks = append(asks, q.Name)
					}
				}
				t.add("preset/"+p.Name, p.Title, strings.Join(p.Parts, ", "), dash(strings.Join(asks, ", ")), p.Reviewed)
			}
			return t.print(a.stdout, newStyler(a, a.stdout))
		},
	}
	cmd.PersistentFlags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.AddCommand(&cobra.Command{
		Use:               "show NAME",
		Short:             "Print a preset: its routes, and the source of every claim",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completePresets,
		RunE: func(_ *cobra.Command, args []string) error {
			p := config.FindPreset(args[0])
			if p == nil {
				return fail(exitUsage, "there is no preset %q; \"waybill presets\" lists them", args[0])
			}
			if asJSON {
				return printJSON(a.stdout, listed(p, true))
			}
			_, err := io.WriteString(a.stdout, p.Text)
			return err
		},
	})
	return cmd
}

func completePresets(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	var names []string
	for _, p := range config.Presets() {
		names = append(names, p.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// usedPreset is a route that comes from a preset, in "waybill check --json".
type usedPreset struct {
	Route string `json:"route"`
	config.PresetUse
}

// presetsInUse are the routes that come from presets, in the order of the file.
func (c *loadedConfig) presetsInUse() []usedPreset {
	var out []usedPreset
	for _, r := range c.snapshot.Routes() {
		if u, ok := c.presets[r.Name]; ok {
			out = append(out, usedPreset{r.Name, u})
		}
	}
	return out
}

// presetPlaceholders are the variables of the presets in use.
func (c *loadedConfig) presetPlaceholders() map[string]string {
	out := map[string]string{}
	for _, u := range c.presetsInUse() {
		if r := c.snapshot.Route(u.Route); r == nil || len(r.Inject) == 0 {
			continue
		}
		for name, v := range config.FindPreset(u.Preset).Placeholders {
			out[name] = v
		}
	}
	return out
}

// presetLine says where the settings of a route come from.
func presetLine(u *config.PresetUse) string {
	s := fmt.Sprintf("%s, its part %s, reviewed %s", u.Preset, u.Part, u.Reviewed)
	written := slices.Clone(u.Written)
	if len(written) == 0 {
		return s + "; the file changes nothing of it"
	}
	return s + "; from the file: " + strings.Join(written, ", ")
}
