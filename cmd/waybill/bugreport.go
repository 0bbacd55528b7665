package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/internal/config"
)

func newBugreport(a *app) *cobra.Command {
	var (
		out   string
		limit int
		quick bool
	)
	cmd := &cobra.Command{
		Use:   "bugreport",
		Short: "Write a bundle for a bug report, without secrets",
		Long: `Write a bundle for a bug report: version, state of the running proxy, what
"waybill doctor" finds, the shape of the configuration, metrics, and the facts of the
newest actions (phase, outcome, retry, code, times, kinds of events).

No secret, no header field, no address, no body and no path of a request is in it;
names of routes, hosts, credentials and files are replaced. Read it all the same
before you give it away.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if out == "" {
				out = "waybill-bugreport-" + time.Now().UTC().Format("20060102-150405") + ".tar.gz"
			}
			return a.bugreport(cmd.Context(), out, limit, quick)
		},
	}
	cmd.Flags().StringVarP(&out, "output", "o", "", "`file` to write (default waybill-bugreport-TIME.tar.gz here); - is standard output")
	cmd.Flags().IntVar(&limit, "actions", 100, "how many of the newest actions")
	cmd.Flags().BoolVar(&quick, "no-clients", false, "start no client and send no request for it")
	_ = cmd.MarkFlagFilename("output", "gz")
	return cmd
}

// bundle is what goes into the archive, by name.
type bundle map[string][]byte

func (b bundle) json(name string, v any) {
	var buf bytes.Buffer
	if err := printJSON(&buf, v); err != nil {
		b[name+".error"] = []byte("could not be written as JSON\n")
		return
	}
	b[name] = buf.Bytes()
}

func (a *app) bugreport(ctx context.Context, out string, limit int, quick bool) error {
	b, err := a.collect(ctx, limit, quick)
	if err != nil {
		return err
	}
	var buf bytes.Buffer
	if err := b.archive(&buf); err != nil {
		return fail(exitFailure, "bugreport: %w", err)
	}
	if out == "-" {
		_, err := a.stdout.Write(buf.Bytes())
		return err
	}
	f, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fail(exitFailure, "bugreport: %w; choose another with --output", err)
	}
	_, err = f.Write(buf.Bytes())
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fail(exitFailure, "bugreport: %w", err)
	}
	_, err = fmt.Fprintf(a.stdout, "%s: %d files, %d KiB; read it before you give it away\n", out, len(b), (buf.Len()+1023)>>10)
	return err
}

// collect gathers the files. What cannot be had is said in the bundle: the reason for
// a report is that something does not work.
func (a *app) collect(ctx context.Context, limit int, quick bool) (bundle, error) {
	d := doctor{a: a, offline: quick, anyFS: true, limit: 20 * time.Second}
	if err := d.run(ctx); err != nil {
		return nil, err
	}
	known := schemaWords()
	hide := a.hider(&d, known)
	b := bundle{}
	b.json("version.json", readBuildInfo())
	for i := range d.doc.Findings {
		f := &d.doc.Findings[i]
		f.What, f.Fix = hide(f.What), hide(f.Fix)
	}
	d.doc.Config, d.doc.Data = hide(d.doc.Config), hide(d.doc.Data)
	b.json("doctor.json", d.doc)
	b["environment.txt"] = a.environmentNames()
	b["machine.txt"] = fmt.Appendf(nil, "%s/%s, %d CPUs\n%s", runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), kernel())
	outline, err := config.Outline(a.configPath(), known.key)
	if err != nil {
		outline = "not available: " + hide(errWithoutPath(err)) + "\n"
	}
	b["configuration.yaml"] = []byte(outline)
	if d.status != nil {
		st := *d.status
		st.Data, st.Admin, st.NotReady, st.Audit = hide(st.Data), hide(st.Admin), hide(st.NotReady), nil
		st.SecretVariables = nil
		if st.JournalHealth != nil {
			st.JournalHealth.Reason = hide(st.JournalHealth.Reason)
		}
		b["metrics.txt"] = scrapeMetrics(ctx, st.Metrics)
		st.Proxy, st.SSH, st.Metrics = hide(st.Proxy), hide(st.SSH), hide(st.Metrics)
		b.json("status.json", st)
	}
	b["actions.jsonl"] = a.actionFacts(ctx, limit)
	b["README.txt"] = []byte("Written by \"waybill bugreport\". Names, paths, hosts and addresses are replaced; no secret and no content of a request is in it.\n")
	return b, nil
}

// errWithoutPath is an error's kind: os errors name files.
func errWithoutPath(err error) string {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Op + ": " + pe.Err.Error()
	}
	return err.Error()
}

// environmentNames lists the variables that matter, by name only.
func (a *app) environmentNames() []byte {
	var names []string
	for _, kv := range a.environ {
		name, _, _ := strings.Cut(kv, "=")
		if ignored(name) || slices.Contains(replacingCA, name) || slices.Contains(addingCA, name) || slices.Contains(droppedProxy, name) ||
			slices.Contains([]string{"GODEBUG", "GOMEMLIMIT", "GOMAXPROCS", "JAVA_TOOL_OPTIONS", "LD_PRELOAD", "NODE_USE_ENV_PROXY", "NODE_OPTIONS", "WAYBILL_CONFIG", "WAYBILL_DATA", "WAYBILL_SESSION", "XDG_STATE_HOME"}, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return []byte(strings.Join(append(slices.Compact(names), ""), "\n"))
}

func kernel() []byte {
	v, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return nil
	}
	return v
}

// metricLabels are labels whose values are words of this program; others are hidden.
var metricLabels = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)

var namedLabels = []string{"route", "credential", "caller", "host", "key"}

func scrapeMetrics(ctx context.Context, addr string) []byte {
	if addr == "" {
		return []byte("the proxy has no metrics listener\n")
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+reachable(addr)+"/metrics", http.NoBody)
	if err != nil {
		return []byte("not available\n")
	}
	resp, err := (&http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return []byte("the metrics listener does not answer\n")
	}
	defer func() { _ = resp.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	stand := map[string]string{}
	return metricLabels.ReplaceAllFunc(text, func(m []byte) []byte {
		name, value, _ := strings.Cut(string(m), "=")
		if !slices.Contains(namedLabels, name) {
			return m
		}
		if _, ok := stand[value]; !ok {
			stand[value] = fmt.Sprintf("%s%d", name, len(stand)+1)
		}
		return fmt.Appendf(nil, "%s=%q", name, stand[value])
	})
}

// actionFact is what a bundle says of one action: only words of this program, numbers and times.
type actionFact struct {
	ID         string   `json:"id"`
	Phase      string   `json:"phase"`
	Outcome    string   `json:"outcome"`
	Retry      string   `json:"retry"`
	Code       string   `json:"code,omitempty"`
	Ended      bool     `json:"ended"`
	Attempts   int      `json:"attempts"`
	Started    bool     `json:"dispatch_started"`
	AcceptedAt string   `json:"accepted_at"`
	Events     []string `json:"events,omitempty"`
}

func (a *app) actionFacts(ctx context.Context, limit int) []byte {
	var buf bytes.Buffer
	err := withReader(ctx, a, func(r reader) error {
		for v, err := range r.Actions(ctx, dispatch.Filter{Limit: limit}) {
			if err != nil {
				return err
			}
			f := actionFact{ID: v.InvocationID, Phase: v.Phase, Outcome: v.Outcome, Retry: v.Retry, Code: v.Code, Ended: v.Ended, Attempts: v.Attempts, Started: v.DispatchStarted, AcceptedAt: v.AcceptedAt.UTC().Format(time.RFC3339Nano)}
			if id, err := dispatch.ParseActionID(v.InvocationID); err == nil {
				events, err := r.Events(ctx, id)
				if err != nil {
					return err
				}
				for _, e := range events {
					f.Events = append(f.Events, fmt.Sprintf("%d %s %s", e.Seq, e.At.UTC().Format("15:04:05.000"), e.Type))
				}
			}
			if err := printLine(&buf, f); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		buf.WriteString(`{"error": "the journal could not be read to its end"}` + "\n")
	}
	return buf.Bytes()
}

// archive writes a gzipped tar with fixed owners and times.
func (b bundle) archive(w io.Writer) error {
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	names := make([]string, 0, len(b))
	for name := range b {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := t.WriteHeader(&tar.Header{Name: filepath.Join("waybill-bugreport", name), Mode: 0o600, Size: int64(len(b[name])), Format: tar.FormatPAX}); err != nil {
			return err
		}
		if _, err := t.Write(b[name]); err != nil {
			return err
		}
	}
	if err := t.Close(); err != nil {
		return err
	}
	return z.Close()
}
