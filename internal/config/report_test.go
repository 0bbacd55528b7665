package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"waybill/routes"
)

// Report is what "waybill check" says about a file. Its JSON form is stable. It
// holds names of credentials and where they come from, never a secret.
type Report struct {
	File        string             `json:"file"`
	OK          bool               `json:"ok"`
	Snapshot    string             `json:"snapshot,omitempty"`
	Default     string             `json:"default,omitempty"`
	Listen      *ReportListen      `json:"listen,omitempty"`
	Routes      []ReportRoute      `json:"routes,omitempty"`
	Credentials []ReportCredential `json:"credentials,omitempty"`
	Callers     []string           `json:"callers,omitempty"`
	Errors      []ReportProblem    `json:"errors,omitempty"`
	Warnings    []ReportProblem    `json:"warnings,omitempty"`
}

// ReportListen are the listeners.
type ReportListen struct {
	Proxy   string `json:"proxy"`
	SSH     string `json:"ssh"`
	Admin   string `json:"admin,omitempty"`
	Metrics string `json:"metrics"`
}

// ReportRoute is one route in a line.
type ReportRoute struct {
	Name       string   `json:"name"`
	Hosts      []string `json:"hosts"`
	Ports      []int    `json:"ports,omitempty"`
	Methods    []string `json:"methods,omitempty"`
	Paths      []string `json:"paths,omitempty"`
	Deny       bool     `json:"deny,omitempty"`
	Inject     []string `json:"inject,omitempty"` // "Field (credential)"
	Repeatable *bool    `json:"repeatable,omitempty"`
	Callers    []string `json:"callers,omitempty"`
	// Proxy is the route's upstream proxy, without user and password.
	Proxy string `json:"proxy,omitempty"`
}

// ReportCredential says where a secret comes from.
type ReportCredential struct {
	ID    string `json:"id"`
	Kind  string `json:"kind"`
	Label string `json:"label,omitempty"`
}

// ReportProblem is a Problem with the fields an editor or a CI job wants.
type ReportProblem struct {
	File   string `json:"file"`
	Line   int    `json:"line,omitempty"`
	Column int    `json:"column,omitempty"`
	Path   string `json:"path,omitempty"`
	What   string `json:"what"`
	Fix    string `json:"fix,omitempty"`
}

// NewReport describes the outcome of Load or Parse for the file at path.
func NewReport(path string, c *Config, err error) Report {
	rep := Report{File: path}
	var list Errors
	switch {
	case errors.As(err, &list):
		rep.Errors = reportProblems(list)
		return rep
	case err != nil:
		rep.Errors = []ReportProblem{{File: path, What: err.Error()}}
		return rep
	}
	rep.OK, rep.Snapshot, rep.Default = true, c.Digest, DefaultName(c.Snapshot.Default())
	rep.Listen = &ReportListen{c.Listen.Proxy, c.Listen.SSH, c.Listen.Admin, c.Listen.Metrics}
	rep.Warnings = reportProblems(c.Warnings)
	for _, r := range c.Snapshot.Routes() {
		rr := ReportRoute{
			Name: r.Name, Hosts: r.Match.Hosts, Ports: r.Match.Ports, Methods: r.Match.Methods, Paths: r.Match.Paths,
			Deny: r.Deny, Repeatable: r.Contract.Repeatable, Callers: r.Callers,
		}
		if r.Upstream.Proxy != nil {
			rr.Proxy = r.Upstream.Proxy.Origin()
		}
		for i := range r.Inject {
			rr.Inject = append(rr.Inject, r.Inject[i].Place()+" ("+r.Inject[i].Credential+")")
		}
		rep.Routes = append(rep.Routes, rr)
	}
	for _, cr := range c.Credentials {
		rep.Credentials = append(rep.Credentials, ReportCredential{cr.ID, cr.Kind(), cr.Label})
	}
	for _, ca := range c.Callers {
		rep.Callers = append(rep.Callers, ca.Name)
	}
	return rep
}

func reportProblems(list []Problem) []ReportProblem {
	var out []ReportProblem
	for _, p := range list {
		out = append(out, ReportProblem(p))
	}
	return out
}

// DefaultName returns the word of the file for d.
func DefaultName(d routes.Default) string {
	switch d {
	case routes.Deny:
		return "deny"
	case routes.Tunnel:
		return "tunnel"
	}
	return "invalid"
}

// WriteJSON prints the report as one JSON object.
func (rep Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(rep)
}

// WriteText prints the report for people: problems as file:line:column lines, then
// what the file says.
func (rep Report) WriteText(w io.Writer) error {
	var b strings.Builder
	for _, p := range rep.Errors {
		if p.Line == 0 {
			fmt.Fprintf(&b, "error: %s: %s\n", p.File, p.What)
			continue
		}
		fmt.Fprintf(&b, "error: %s\n", Problem(p))
	}
	for _, p := range rep.Warnings {
		fmt.Fprintf(&b, "warning: %s\n", Problem(p))
	}
	if !rep.OK {
		fmt.Fprintf(&b, "%s: not usable, %s\n", rep.File, count(len(rep.Errors), "problem"))
		_, err := io.WriteString(w, b.String())
		return err
	}
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	if len(rep.Routes) > 0 {
		if len(rep.Warnings) > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintln(tw, "ROUTE\tHOSTS\tMETHODS\tPATHS\tINJECTS")
	}
	for _, r := range rep.Routes {
		hosts := strings.Join(r.Hosts, ",")
		for i, p := range r.Ports {
			hosts += string(":,"[min(i, 1)]) + strconv.Itoa(p)
		}
		injects := strings.Join(r.Inject, ", ")
		if r.Deny {
			injects = "refused"
		}
		if r.Proxy != "" {
			hosts += " through " + r.Proxy
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\n", r.Name, hosts, orAny(r.Methods), orAny(r.Paths), orDash(injects))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if b.Len() > 0 {
		b.WriteByte('\n')
	}
	fmt.Fprintf(&b, "%s: ok, %s, %s, %s, default: %s\nsnapshot %s\n", rep.File, count(len(rep.Routes), "route"),
		count(len(rep.Credentials), "credential"), count(len(rep.Warnings), "warning"), rep.Default, rep.Snapshot)
	_, err := io.WriteString(w, b.String())
	return err
}

func orAny(list []string) string {
	if len(list) == 0 {
		return "any"
	}
	return strings.Join(list, ",")
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return strconv.Itoa(n) + " " + what
}
