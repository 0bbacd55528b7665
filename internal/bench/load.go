package bench

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// requestBytes is the length of every request's body.
const requestBytes = 256

// Load describes one measurement: Warmup of load, a pause in which counters are
// read, Window of load that counts, and the counters again when the last answer
// has come. Because nothing is under way at either reading, figures per request
// are exact.
type Load struct {
	Scenario
	Proxy     string // address
	Authority string // host:port of the target, as CONNECT or the absolute form names it
	RootCA    string // file with what signs the intercepted connections
	Warmup    time.Duration
	Window    time.Duration
	// Requests, if not zero, ends the window after so many requests as well.
	Requests int64
	// PID of the proxy, whose processor time and memory are read; 0: not.
	PID int
	// Metrics is the URL of the proxy's Prometheus metrics, Origin the address of the
	// origin's counters; "": not read.
	Metrics string
	Origin  string
}

// Sample is what one measurement found.
type Sample struct {
	Requests int64 `json:"requests"` // answered, after the warm-up
	InWindow int64 `json:"in_window"`
	Errors   int64 `json:"errors"`
	// FirstError is the text of the first of them.
	FirstError string        `json:"first_error,omitempty"`
	Window     time.Duration `json:"window_ns"` // from the first request to the deadline, or to the last answer if Requests ended it
	P50        time.Duration `json:"p50_ns"`
	P99        time.Duration `json:"p99_ns"`
	Mean       time.Duration `json:"mean_ns"`
	CPU        time.Duration `json:"cpu_ns"` // of the proxy and its children
	RSS        int64         `json:"rss_bytes"`
	// Peak is the high-water mark of the window where the kernel lets it be reset, of
	// the process's life elsewhere.
	Peak        int64   `json:"peak_bytes"`
	Connections int64   `json:"upstream_connections"` // new ones
	Upstream    int64   `json:"upstream_requests"`
	Commits     float64 `json:"journal_commits"`
	Appends     float64 `json:"journal_appends"`
	CommitTime  float64 `json:"journal_commit_seconds"`
	Syncs       float64 `json:"journal_syncs"` // the journal's own count; 0 where it has none
	Began       int64   `json:"began_unix_ns"`
	Ended       int64   `json:"ended_unix_ns"`
}

// Rate is the requests per second that were answered inside the window.
func (s *Sample) Rate() float64 {
	if s.Window <= 0 {
		return 0
	}
	return float64(s.InWindow) / s.Window.Seconds()
}

// ioLimit bounds one phase beyond its planned end: a proxy that hangs ends the
// measurement.
const ioLimit = 30 * time.Second

type loader struct {
	Load
	tls  *tls.Config
	head []byte // the request up to the counter

	seq      atomic.Int64
	deadline atomic.Int64 // unix ns
	left     atomic.Int64
	begin    chan struct{} // closed: the window begins
	errs     atomic.Int64
	first    atomic.Pointer[string]
}

// Run measures. It returns an error when it could not; requests that failed are
// counted in the sample.
func (l Load) Run(ctx context.Context) (*Sample, error) {
	if l.Clients < 1 || l.Clients > 4096 || l.Window <= 0 || l.Window > 10*time.Minute {
		return nil, fmt.Errorf("bench: load of %d clients for %v: out of bounds", l.Clients, l.Window)
	}
	ld := &loader{Load: l, begin: make(chan struct{})}
	if err := ld.prepare(); err != nil {
		return nil, err
	}
	if l.Requests > 0 {
		ld.left.Store(l.Requests)
	} else {
		ld.left.Store(1 << 62)
	}
	ld.deadline.Store(time.Now().Add(l.Warmup).UnixNano())
	var warm, done sync.WaitGroup
	results := make([][]timed, l.Clients)
	for i := range l.Clients {
		warm.Add(1)
		done.Go(func() { results[i] = ld.client(i, &warm) })
	}
	warm.Wait()
	if ctx.Err() != nil {
		close(ld.begin)
		done.Wait()
		return nil, ctx.Err()
	}
	warmErrors := ld.errs.Load()
	before, err := ld.read(ctx, true)
	if err != nil {
		ld.deadline.Store(0)
		close(ld.begin)
		done.Wait()
		return nil, err
	}
	s := &Sample{}
	start := time.Now()
	end := start.Add(l.Window)
	s.Began = start.UnixNano()
	ld.deadline.Store(end.UnixNano())
	close(ld.begin)
	done.Wait()
	s.Ended = time.Now().UnixNano()
	after, err := ld.read(ctx, false)
	if err != nil {
		return nil, err
	}
	ld.sum(s, results, start, end)
	s.Errors = ld.errs.Load()
	if e := ld.first.Load(); e != nil {
		s.FirstError = *e
	}
	if warmErrors > 0 && s.Requests == 0 {
		return s, fmt.Errorf("bench: %s: no request succeeded: %s", l.Name(), s.FirstError)
	}
	after.since(before, s)
	return s, nil
}

// timed is one answered request.
type timed struct {
	took int64 // ns
	at   int64 // unix ns
}

func (ld *loader) sum(s *Sample, results [][]timed, start, end time.Time) {
	var took []int64
	last := start.UnixNano()
	var total int64
	for _, r := range results {
		for _, t := range r {
			took = append(took, t.took)
			total += t.took
			last = max(last, t.at)
			if t.at <= end.UnixNano() {
				s.InWindow++
			}
		}
	}
	slices.Sort(took)
	s.Requests = int64(len(took))
	s.P50, s.P99 = time.Duration(Quantile(took, .5)), time.Duration(Quantile(took, .99))
	if s.Requests > 0 {
		s.Mean = time.Duration(total / s.Requests)
	}
	s.Window = end.Sub(start)
	if ld.Requests > 0 && s.Requests >= ld.Requests && last < end.UnixNano() {
		s.Window = time.Duration(last - start.UnixNano())
	}
}

func (ld *loader) prepare() error {
	host, _, err := net.SplitHostPort(ld.Authority)
	if err != nil {
		return fmt.Errorf("bench: authority: %w", err)
	}
	name, target := ld.Authority, bodyPath+strconv.Itoa(ld.Bytes)
	switch ld.Mode {
	case Intercepted:
		pem, err := os.ReadFile(ld.RootCA)
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return fmt.Errorf("bench: %s: no certificate", ld.RootCA)
		}
		ld.tls = &tls.Config{RootCAs: pool, ServerName: host, NextProtos: []string{"http/1.1"}}
	case Absolute:
		target = "http://" + ld.Authority + target
	default:
		return fmt.Errorf("bench: mode %q", ld.Mode)
	}
	// Default ports are left out of Host and the absolute form, as clients do.
	if ld.Authority == host+":443" || ld.Authority == host+":80" {
		name = host
		if ld.Mode == Absolute {
			target = "http://" + host + bodyPath + strconv.Itoa(ld.Bytes)
		}
	}
	ld.head = []byte("POST " + target + " HTTP/1.1\r\nHost: " + name +
		"\r\nUser-Agent: waybill-bench\r\nAccept: application/json\r\nAuthorization: Bearer placeholder\r\nContent-Type: application/json\r\nContent-Length: " +
		strconv.Itoa(requestBytes) + "\r\n\r\n")
	return nil
}

// body appends a JSON body of requestBytes that no other request has: a repeated
// request might be taken for a duplicate.
func (ld *loader) body(b []byte, seq int64) []byte {
	start := len(b)
	b = append(b, `{"run":"`...)
	b = strconv.AppendInt(b, started, 36)
	b = append(b, `","n":`...)
	b = strconv.AppendInt(b, seq, 10)
	b = append(b, `,"text":"`...)
	for len(b) < start+requestBytes-2 {
		b = append(b, 'x')
	}
	return append(b, `"}`...)
}

// started tells this process's requests from those of others.
var started = time.Now().UnixNano()

// client sends one request after the other.
func (ld *loader) client(i int, warm *sync.WaitGroup) []timed {
	c := &client{ld: ld, id: i}
	defer c.close()
	c.loop(nil)
	warm.Done()
	<-ld.begin
	out := make([]timed, 0, 4096)
	c.limit()
	c.loop(&out)
	return out
}

type client struct {
	ld   *loader
	id   int
	n    int
	conn net.Conn
	r    *bufio.Reader
	buf  []byte
}

// loop sends until the deadline; at least one request in the warm-up, so that the
// connection exists when the window begins.
func (c *client) loop(out *[]timed) {
	failures := 0
	for n := 0; ; n++ {
		now := time.Now()
		if (out != nil || n > 0) && now.UnixNano() >= c.ld.deadline.Load() {
			return
		}
		if out != nil && c.ld.left.Add(-1) < 0 {
			return
		}
		if err := c.do(); err != nil {
			c.ld.fail(err)
			c.close()
			if failures++; failures > 20 {
				return
			}
			time.Sleep(10 * time.Millisecond) // a proxy that refuses is not hammered
			continue
		}
		end := time.Now()
		if out != nil {
			*out = append(*out, timed{took: int64(end.Sub(now)), at: end.UnixNano()})
		}
	}
}

func (ld *loader) fail(err error) {
	ld.errs.Add(1)
	text := err.Error()
	ld.first.CompareAndSwap(nil, &text)
}

// limit bounds the phase that begins.
func (c *client) limit() {
	if c.conn != nil {
		_ = c.conn.SetDeadline(time.Now().Add(c.ld.Warmup + c.ld.Window + ioLimit))
	}
}

func (c *client) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// connect opens a connection. Source addresses take turns, or the ports of one would
// run out in TIME_WAIT.
func (c *client) connect() error {
	c.n++
	d := net.Dialer{Timeout: 10 * time.Second, LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+(c.id*31+c.n)%250))}}
	conn, err := d.Dial("tcp4", c.ld.Proxy)
	if err != nil {
		return err
	}
	c.conn = conn
	c.limit()
	if c.r == nil {
		c.r = bufio.NewReaderSize(conn, min(64<<10, max(4<<10, c.ld.Bytes)))
	} else {
		c.r.Reset(conn)
	}
	if c.ld.Mode == Absolute {
		return nil
	}
	if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", c.ld.Authority, c.ld.Authority); err != nil {
		return err
	}
	status, _, err := c.head()
	if err != nil {
		return fmt.Errorf("CONNECT: %w", err)
	}
	if status != 200 {
		return fmt.Errorf("CONNECT: status %d", status)
	}
	tc := tls.Client(conn, c.ld.tls)
	if err := tc.Handshake(); err != nil {
		return err
	}
	c.conn = tc
	c.r.Reset(tc)
	return nil
}

var errAnswer = errors.New("not an HTTP/1.1 answer")

// head reads a status line and the fields, past interim answers.
func (c *client) head() (int, fields, error) {
	for {
		line, err := c.r.ReadSlice('\n')
		if err != nil {
			return 0, fields{}, err
		}
		if len(line) < len("HTTP/1.1 200") || string(line[:7]) != "HTTP/1." {
			return 0, fields{}, errAnswer
		}
		status, err := strconv.Atoi(string(line[9:12]))
		if err != nil {
			return 0, fields{}, errAnswer
		}
		http10 := line[7] == '0'
		h, err := readFields(c.r, nil)
		if err != nil {
			return 0, fields{}, err
		}
		h.close = h.close || http10
		if status >= 200 {
			return status, h, nil
		}
	}
}

// do sends one request and reads the whole answer.
func (c *client) do() error {
	if c.conn == nil {
		if err := c.connect(); err != nil {
			return err
		}
	}
	c.buf = append(c.buf[:0], c.ld.head...)
	c.buf = c.ld.body(c.buf, c.ld.seq.Add(1))
	if _, err := c.conn.Write(c.buf); err != nil {
		return err
	}
	status, h, err := c.head()
	if err != nil {
		return err
	}
	n, err := h.countBody(c.r, true)
	if err != nil {
		return err
	}
	if status != 200 || n != int64(c.ld.Bytes) {
		return fmt.Errorf("status %d with %d bytes, want 200 with %d", status, n, c.ld.Bytes)
	}
	if c.ld.NewConn || h.close {
		c.close()
	}
	return nil
}

// reading is every counter at one moment.
type reading struct {
	usage   Usage
	origin  OriginStats
	metrics map[string]float64
}

// read takes the counters. At the beginning of a window it lowers the high-water
// mark of the memory.
func (ld *loader) read(ctx context.Context, begin bool) (*reading, error) {
	r := &reading{}
	ctx, cancel := context.WithTimeout(ctx, ioLimit)
	defer cancel()
	if ld.Metrics != "" {
		body, err := get(ctx, ld.Metrics)
		if err != nil {
			return nil, err
		}
		r.metrics = parseMetrics(body)
	}
	if ld.Origin != "" {
		body, err := get(ctx, "http://"+ld.Origin+"/stats")
		if err != nil {
			return nil, err
		}
		if err := json.Unmarshal(body, &r.origin); err != nil {
			return nil, fmt.Errorf("bench: origin's counters: %w", err)
		}
	}
	if ld.PID == 0 {
		return r, nil
	}
	var err error
	if begin {
		resetPeak(ld.PID)
	}
	if r.usage, err = ProcessUsage(ld.PID); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *reading) since(before *reading, s *Sample) {
	s.CPU = r.usage.CPU - before.usage.CPU
	s.RSS, s.Peak = r.usage.RSS, r.usage.Peak
	s.Connections = r.origin.Connections - before.origin.Connections
	s.Upstream = r.origin.Requests - before.origin.Requests
	delta := func(name string) float64 { return r.metrics[name] - before.metrics[name] }
	s.Commits = delta("waybill_journal_group_requests_count")
	s.Appends = delta("waybill_journal_group_requests_sum")
	s.CommitTime = delta("waybill_journal_commit_seconds_sum")
	s.Syncs = delta("waybill_journal_syncs_total")
}

func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	// Neither proxy variables nor kept connections: this is not part of the load.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("bench: %s: status %d", url, resp.StatusCode)
	}
	return readAll(resp.Body)
}
