package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// logLine is one line of the log, whichever its format.
type logLine map[string]string

// parseLog reads a log strictly: each line is one record of the format, with time, level
// and message.
func parseLog(t *testing.T, format, text string) (out []logLine) {
	t.Helper()
	for raw := range strings.Lines(text) {
		line, err := parseLine(format, strings.TrimSuffix(raw, "\n"))
		if err != nil || !strings.HasSuffix(raw, "\n") {
			t.Fatalf("not a line of the log (%v): %q", err, raw)
		}
		if _, err := time.Parse(time.RFC3339Nano, line["time"]); err != nil || line["level"] == "" || line["msg"] == "" {
			t.Fatalf("without time, level or message: %q", raw)
		}
		out = append(out, line)
	}
	return out
}

func parseLine(format, raw string) (logLine, error) {
	line := logLine{}
	if format == "json" {
		var v map[string]any
		if err := json.Unmarshal([]byte(raw), &v); err != nil {
			return nil, err
		}
		for k, value := range v {
			if line[k] = fmt.Sprint(value); value == nil {
				line[k] = ""
			}
		}
		return line, nil
	}
	for raw != "" {
		key, rest, ok := strings.Cut(raw, "=")
		if !ok || key == "" || strings.ContainsAny(key, " \"") {
			return nil, fmt.Errorf("no key=value at %q", raw)
		}
		if _, twice := line[key]; twice {
			return nil, fmt.Errorf("%s twice", key)
		}
		value, err := strconv.QuotedPrefix(rest)
		if err == nil {
			line[key], err = strconv.Unquote(value)
			rest = rest[len(value):]
		} else {
			value, _, _ = strings.Cut(rest, " ")
			line[key], err = value, nil
			rest = rest[len(value):]
		}
		if err != nil || rest != "" && rest[0] != ' ' {
			return nil, fmt.Errorf("bad value of %s", key)
		}
		raw = strings.TrimPrefix(rest, " ")
	}
	return line, nil
}

// levels in their order, as the log writes them.
var levels = []string{"DEBUG", "INFO", "WARN", "ERROR"}

// TestLog: the log of the real binary is JSON or text, one line a record, of the level
// asked for and above; exactly one line tells each action, with the facts of the journal;
// and at no level is a secret, a field, a query or a body in it (CONTRACT C2, C4).
func TestLog(t *testing.T) {
	t.Parallel()
	contract.Covers(t, "C2", "S1")
	ca := testkit.NewCA(t)
	private := testkit.NewCanary(t)
	pay := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		head := "HTTP/1.1 200 OK\r\nX-Answer: " + private.Value() + "\r\n"
		switch path, _, _ := strings.Cut(a.Target, "?"); path {
		case "/v1/cut":
			return []testkit.Step{testkit.Close()}
		case "/v1/broken":
			return []testkit.Step{testkit.Write(head + "Content-Length: 5000\r\n\r\n" + private.Value()), testkit.Close()}
		case "/v1/malformed":
			return []testkit.Step{testkit.Write("HTTP/9.9 " + private.Value() + "\r\n" + private.Value() + "\r\n\r\n"), testkit.Close()}
		case "/v1/refused":
			return []testkit.Step{testkit.Reply(403, private.Value(), "X-Answer", private.Value())}
		case "/v1/events":
			return []testkit.Step{testkit.Reply(200, "data: "+private.Value()+"\n\n", "Content-Type", "text/event-stream")}
		case "/v1/echo":
			return []testkit.Step{testkit.Reply(200, strings.Join(a.Values("Authorization"), ""))}
		}
		// What comes after the answer is what net/http would print by itself.
		return []testkit.Step{testkit.Write(head + "Content-Length: 2\r\n\r\nokHTTP/1.1 200 " + private.Value() + "\r\n\r\n")}
	}})
	type request struct{ method, url string }
	const forged = "%0a%0dmsg=action%20level=ERROR%1b[2J"
	requests := []request{
		{"POST", "https://" + payHost + "/v1/ok"}, {"GET", "https://" + payHost + "/v1/ok"}, {"POST", "https://" + payHost + "/v1/cut"}, {"POST", "https://" + payHost + "/v1/broken"},
		{"POST", "https://" + payHost + "/v1/malformed"}, {"POST", "https://" + payHost + "/v1/refused"}, {"GET", "https://" + payHost + "/v1/events"}, {"GET", "https://" + payHost + "/v1/echo"},
		{"GET", "https://" + payHost + "/" + forged}, {"POST", "https://" + msgHost + "/no/such/port"}, {"GET", "https://nobody.example.test/x"}, {"DELETE", "https://" + payHost + "/../x"},
	}
	for _, form := range []struct{ format, level string }{{"json", "debug"}, {"json", "info"}, {"text", "debug"}, {"text", "warn"}, {"json", "error"}} {
		t.Run(form.format+"-"+form.level, func(t *testing.T) {
			r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: pay.Addr()}})
			r.flags = []string{"--log-format", form.format, "--log-level", form.level}
			r.start()
			client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
			for _, q := range requests {
				body := "body=" + private.Value()
				if q.method == http.MethodGet {
					body = ""
				}
				_, _ = testkit.TrySend(t, client, q.method, q.url+"?q="+private.Value(), body, "X-Field", private.Value(), "Authorization", "Bearer "+private.Value(), "Cookie", "a="+private.Value())
			}
			// Raw bytes that are no request, and a configuration with a mistake: both are told, at levels of their own.
			c := testkit.Dial(t, r.addr)
			c.Send(t, "GET http://"+plainHost+"/ HTTP/1.1\r\nHost: "+plainHost+"\r\nX-Field : "+private.Value()+"\r\n\r\n")
			_, _ = c.ReadAll()
			r.write("c.yaml", "version: 1\nroutes: "+private.Value()+"\n")
			r.p.Signal(t, syscall.SIGHUP)
			for end := time.Now().Add(patience); !strings.Contains(r.p.Stderr(), "configuration not loaded"); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("a reload that failed is not in the log: %s", r.p.Stderr())
				}
			}
			actions := r.actions()
			r.p.Signal(t, term)
			r.p.Wait(t, patience)
			text := r.p.Stderr()
			testkit.Search(t, r.canary, testkit.InString("log", text), testkit.InString("stdout", r.p.Stdout()))
			testkit.Search(t, private, testkit.InString("log", text), testkit.InString("stdout", r.p.Stdout()))

			lines := parseLog(t, form.format, text)
			least := slices.Index(levels, strings.ToUpper(form.level))
			seen, told := map[string]int{}, map[string][]logLine{}
			for _, l := range lines {
				if n := slices.Index(levels, l["level"]); n < least {
					t.Errorf("a line of level %q in a log from %q on: %v", l["level"], form.level, l)
				}
				seen[l["level"]]++
				if l["msg"] == "action" {
					told[l["action"]] = append(told[l["action"]], l)
				}
			}
			if form.level == "debug" && seen["DEBUG"] == 0 || seen["ERROR"] == 0 {
				t.Errorf("lines by level: %v", seen)
			}
			if least > slices.Index(levels, "INFO") {
				if len(told) != 0 {
					t.Errorf("actions are told at level info, not at %s: %v", form.level, told)
				}
				return
			}
			if len(actions) < len(requests) || len(told) != len(actions) {
				t.Errorf("the log tells of %d actions, the journal of %d, %d requests were sent", len(told), len(actions), len(requests))
			}
			for i := range actions {
				canonicalLine(t, &actions[i], told[actions[i].InvocationID])
			}
		})
	}
}

// canonicalLine holds the line of an action against its record.
func canonicalLine(t *testing.T, v *dispatch.ActionView, lines []logLine) {
	t.Helper()
	if len(lines) != 1 {
		t.Errorf("%d lines of %s %s %s", len(lines), v.InvocationID, v.Method, v.Target)
		return
	}
	l := lines[0]
	want := logLine{"level": "INFO", "caller": v.Caller, "route": v.Route, "method": v.Method, "target": v.Target, "phase": v.Phase, "outcome": v.Outcome, "code": v.Code, "attempts": strconv.Itoa(v.Attempts)}
	for k, w := range want {
		if l[k] != w {
			t.Errorf("%s: %s=%q in the log, %q in the journal", v.InvocationID, k, l[k], w)
		}
	}
	if _, err := strconv.Atoi(l["duration_ms"]); err != nil || l["retry"] == "" || l["status"] == "" {
		t.Errorf("%s: %v", v.InvocationID, l)
	}
	known := []string{"time", "level", "msg", "action", "caller", "session", "route", "method", "target", "phase", "outcome", "retry", "code", "status", "attempts", "duration_ms"}
	for k := range l {
		if !slices.Contains(known, k) {
			t.Errorf("%s: an attribute %q that nobody knows", v.InvocationID, k)
		}
	}
}

// TestLogFlags: a level or a format that does not exist is a mistake that is named.
func TestLogFlags(t *testing.T) {
	r := newRig(t, testkit.NewCA(t), rigOptions{})
	for _, flags := range [][]string{{"--log-level", "loud"}, {"--log-format", "xml"}} {
		code, _, errs := r.cli(append([]string{"serve", "--proxy", "127.0.0.1:0"}, flags...)...)
		if code != 2 || !strings.Contains(errs, flags[0]+" "+flags[1]) {
			t.Errorf("%v: %d %s", flags, code, errs)
		}
	}
	if _, err := os.Stat(filepath.Join(r.data, "journal")); err == nil {
		t.Error("a start that was refused made a journal")
	}
}
