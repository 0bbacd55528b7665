package main

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
)

// The demo is the real program against upstreams that count: every line must be as
// the contract says, and nothing may stay behind.
func TestDemo(t *testing.T) {
	contract.Covers(t, "A5", "A6", "F2", "F5", "G1", "G2", "G3", "G5", "G10", "G12", "H2", "H3", "H10", "L5", "L7", "M2", "M4", "O3", "T1")
	tmp := t.TempDir()
	cmd := exec.Command("waybill", "demo", "--json")
	cmd.Env = append(cmd.Environ(), "TMPDIR="+tmp)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	start := time.Now()
	err := cmd.Run()
	took := time.Since(start)
	var lines []struct {
		Scenario        string   `json:"scenario"`
		Phase           string   `json:"phase"`
		Outcome         string   `json:"outcome"`
		Retry           string   `json:"retry"`
		Code            *string  `json:"code"`
		UpstreamEffects *int     `json:"upstream_effects"`
		OK              bool     `json:"ok"`
		Problems        []string `json:"problems"`
	}
	if jerr := json.Unmarshal(out.Bytes(), &lines); jerr != nil {
		t.Fatalf("%v, %v\n%s\n%s", err, jerr, out.String(), errOut.String())
	}
	for _, l := range lines {
		if !l.OK || l.Phase == "" || l.Outcome == "" || l.Retry == "" || l.Code == nil || l.UpstreamEffects == nil {
			t.Errorf("%s: %+v", l.Scenario, l)
		}
		// The oracle is the upstream: what it did is never called not attempted
		// (CONTRACT F2), and what it did not do is never called committed.
		if n := *l.UpstreamEffects; l.Outcome == "not_attempted" && n != 0 || l.Outcome == "committed" && n != 1 {
			t.Errorf("%s: %s, says the journal; %d effects, says the upstream", l.Scenario, l.Outcome, n)
		}
	}
	if err != nil || errOut.Len() > 0 {
		t.Errorf("%v: %s", err, errOut.String())
	}
	if len(lines) < 12 || took > 30*time.Second {
		t.Errorf("%d scenarios in %v", len(lines), took)
	}
	if left, err := exec.Command("ls", "-A", tmp).Output(); err != nil || len(left) > 0 {
		t.Errorf("left behind: %s, %v", left, err)
	}
}

func TestDemoTable(t *testing.T) {
	var out strings.Builder
	p := &demoPrinter{a: &app{stdout: &out}}
	p.head()
	p.line(demoLine{Scenario: "x", Phase: 1, Outcome: 1, Retry: 1, OK: false, Problems: []string{"this is wrong"}})
	err := p.finish([]demoLine{{OK: false}}, false, nil, time.Second)
	if report(&out, err) != exitFailure || !strings.Contains(out.String(), "this is wrong") || !strings.Contains(out.String(), "FAIL") || strings.Contains(out.String(), "\x1b") {
		t.Errorf("%v\n%s", err, out.String())
	}
	if report(&out, p.finish([]demoLine{{OK: true}}, true, []string{"data/journal/x"}, time.Second)) != exitFailure {
		t.Error("a leaked secret is no success")
	}
	if report(&out, p.finish([]demoLine{{OK: true}}, false, nil, time.Second)) != exitOK {
		t.Error("a good demo is a success")
	}
}

func TestHoldsSecret(t *testing.T) {
	const secret = "demo-secret-ABCDEF"
	for _, text := range []string{"x" + secret, "eGRlbW8tc2VjcmV0LUFCQ0RFRg==", "eHhkZW1vLXNlY3JldC1BQkNERUY=", "ZGVtby1zZWNyZXQtQUJDREVG", "64656d6f2d7365637265742d414243444546"} {
		if !holdsSecret([]byte(text), secret) {
			t.Errorf("not found in %q", text)
		}
	}
	if holdsSecret([]byte("demo-secret-ABCDE"), secret) {
		t.Error("found where it is not")
	}
}
