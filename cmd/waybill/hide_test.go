package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"waybill/internal/contract"
)

// TestHider: no address of either family, no host of one label or of many, and no name
// that the configuration or the environment holds is left in what a bug report says; words
// of this program and this machine's own addresses are (CONTRACT C2).
func TestHider(t *testing.T) {
	contract.Covers(t, "C2")
	dir := t.TempDir()
	path := filepath.Join(dir, "waybill.yaml")
	const text = `version: 1
listen: {proxy: "boxone:7171"}
credentials:
  payments-key: {from: {file: /run/secrets/k}, label: db}
routes:
  - name: rt
    match: {host: billing, methods: [GET, POST], path: /v1/**}
    callers: [any]
    upstream: {proxy: "http://gw:3128", resolve: {billing: "[fd00::7]:443"}}
    contract: {reconcile: {get: "/v1/charges", committed_when: paid}}
    limits: {timeout: 10m}
default: deny
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	a := &app{configFlag: path, environ: []string{"HTTPS_PROXY=http://px:3128", "NO_PROXY=localhost,.intern,db7", "HOSTNAME=agent-7", "TOKEN=abcdefgh", "SHLVL=1"}}
	hide := a.hider(&doctor{a: a, data: "/srv/w/data"}, schemaWords())
	for in, want := range map[string]string{
		"dial tcp [2001:db8::1]:443: connect: no route to host":               "dial tcp [<address>]:443: connect: no route to host",
		"dial tcp: lookup vault on [fe80::53%eth0]:53: no such host":          "dial tcp: lookup <name> on [<address>]:53: no such host",
		"2001:DB8:0:0:8:800:200C:417A: refused; ::ffff:10.1.2.3 too":          "<address>: refused; <address> too",
		"listen at [::]:7171, [::1]:7174 and 127.0.0.1:80, not 192.0.2.1:80.": "listen at [::]:7171, [::1]:7174 and 127.0.0.1:80, not <address>:80.",
		"fd00::7.": "<address>.",
		"HTTPS_PROXY names another proxy: px:3128":     "HTTPS_PROXY names another proxy: <name>:3128",
		"NO_PROXY names intern, which a route takes":   "NO_PROXY names <name>, which a route takes",
		"db7 and db, not dbx; billing of rt":           "<name> and <name>, not dbx; <name> of <name>",
		"the proxy gw:3128 (gw) says paid":             "the proxy <name>:3128 (<name>) says <name>",
		"boxone:7171 and other:99 and localhost:7171":  "<name> and <name>:99 and localhost:7171",
		"agent-7 wrote abcdefgh to api.example.com:44": "<hidden> wrote <hidden> to <name>",
		"HTTP://User@Example/x ":                       "<url> ",
		"it is 12:30:45Z, sha256:abcdef01, 3:5 of waybill.yaml: GET and auto are words of default deny": "it is 12:30:45Z, sha256:abcdef01, 3:5 of waybill.yaml: GET and auto are words of default deny",
	} {
		if got := hide(in); got != want {
			t.Errorf("%q\n became %q\nwant    %q", in, got, want)
		}
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if host != "localhost" && strings.Contains(hide("on "+host+" it fails"), host) {
		t.Errorf("this machine's name %q is left", host)
	}
}

// TestHiderAnywhere: whatever the text around it, no address that is not this machine's own
// is left.
func TestHiderAnywhere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringOf(rapid.SampledFrom([]rune("ab0:.[]()= \"',/@%-_é\n")))
		before, after := text.Draw(t, "before"), text.Draw(t, "after")
		// What touches an address makes it something else.
		before += rapid.SampledFrom([]string{" ", "[", "(", "=", "\""}).Draw(t, "left")
		after = rapid.SampledFrom([]string{" ", "]", ")", "\"", ",", ": ", "\n"}).Draw(t, "right") + after
		for _, ip := range []string{"2001:db8::1", "fe80::1%eth0", "203.0.113.77", "::ffff:203.0.113.77"} {
			if got := hideAddresses(before + ip + after); strings.Contains(got, ip) {
				t.Errorf("%q is left in %q", ip, got)
			}
		}
	})
}
