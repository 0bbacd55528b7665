package client

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"
)

// Defaults of Options.
const (
	DefaultRepeats   = 4
	DefaultMaxWait   = 60 * time.Second
	DefaultAskFor    = 30 * time.Second
	DefaultSettleFor = 3 * time.Second
)

// Options configure a Client. Only Proxy must be set.
type Options struct {
	// Proxy is the proxy's URL: "http://127.0.0.1:7171", or with the user and token of
	// a caller or session, "http://ses_…:wbs_…@127.0.0.1:7171". It is a secret then.
	Proxy string
	// Roots are trusted for TLS with the proxy, inside the tunnel: ca/ca.pem of its data
	// folder. nil: the system's.
	Roots *x509.CertPool
	// AbsoluteForm sends https requests to the proxy in absolute form, without a tunnel
	// and a CA. Only for a proxy on a loopback address: the way to it is in clear. The
	// way from the proxy to the origin is TLS as ever.
	AbsoluteForm bool

	// Repeats is how often a call is repeated at most, where its advice allows it at
	// all. 0: DefaultRepeats; negative: never.
	Repeats int
	// MaxWait is the longest wait before a repeat: an answer that asks for more is
	// returned. 0: DefaultMaxWait.
	MaxWait time.Duration
	// KeyHeaders names fields that carry a remote idempotency key, beside the one that
	// the proxy's evidence shows. nil: Idempotency-Key and X-Idempotency-Key.
	KeyHeaders []string

	// AskFor is how long the proxy is asked for an action after the connection to it
	// was lost: over its restart, and until the action has ended. 0: DefaultAskFor. The
	// caller's deadline ends it sooner.
	AskFor time.Duration
	// SettleFor is how long a proxy that answers, and does not know the action, is
	// asked again: a request may still be on its way. 0: DefaultSettleFor.
	SettleFor time.Duration
	// FetchLost fetches the stored answer of an action that ended while the connection
	// was lost, and returns that (Response.Fetched). Otherwise the call fails with the
	// action's envelope, whose advice is fetch_result.
	FetchLost bool

	// AnswerFailures makes RoundTrip answer a failure with a response, as the proxy
	// would, instead of an error. It is for client libraries that repeat whatever comes
	// back as an error (docs/clients.md). Do is not changed by it.
	AnswerFailures bool

	// Logger is told of repeats, of lost connections, and of UnsafeRepeat with its
	// reason. nil: nobody is.
	Logger *slog.Logger
}

// FromEnvironment returns the options for a program that "waybill run" started, or a
// shell that evaluated "waybill env": the proxy of HTTPS_PROXY (or https_proxy) and the
// roots of SSL_CERT_FILE. getenv is os.Getenv, as a rule. Its error wraps ErrOption
// when there is no proxy, or the roots cannot be read.
func FromEnvironment(getenv func(string) string) (Options, error) {
	o := Options{Proxy: getenv("HTTPS_PROXY")}
	if o.Proxy == "" {
		o.Proxy = getenv("https_proxy")
	}
	if o.Proxy == "" {
		return Options{}, fmt.Errorf("client: HTTPS_PROXY is not set; start the program with \"waybill run\": %w", ErrOption)
	}
	if path := getenv("SSL_CERT_FILE"); path != "" {
		pem, err := os.ReadFile(path)
		if err != nil {
			return Options{}, fmt.Errorf("client: SSL_CERT_FILE: %w: %w", ErrOption, err)
		}
		o.Roots = x509.NewCertPool()
		if !o.Roots.AppendCertsFromPEM(pem) {
			return Options{}, fmt.Errorf("client: SSL_CERT_FILE: no certificate in it: %w", ErrOption)
		}
	}
	return o, nil
}

// complete fills in the defaults.
func (o Options) complete() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.MaxWait, DefaultMaxWait)
	def(&o.AskFor, DefaultAskFor)
	def(&o.SettleFor, DefaultSettleFor)
	switch {
	case o.Repeats == 0:
		o.Repeats = DefaultRepeats
	case o.Repeats < 0:
		o.Repeats = 0
	}
	if o.KeyHeaders == nil {
		o.KeyHeaders = []string{"Idempotency-Key", "X-Idempotency-Key"}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// proxyURL checks Proxy. Its errors do not repeat the value: it may hold a token.
func (o Options) proxyURL() (*url.URL, error) {
	u, err := url.Parse(o.Proxy)
	if err != nil || u.Scheme != "http" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return nil, fmt.Errorf("client: Proxy is not of the form http://host:port: %w", ErrOption)
	}
	if u.Port() == "" {
		u.Host = net.JoinHostPort(u.Hostname(), "80")
	}
	if o.AbsoluteForm && !loopback(u.Hostname()) {
		return nil, fmt.Errorf("client: AbsoluteForm would send requests in clear to another machine: %w", ErrOption)
	}
	return u, nil
}

func loopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// basic is the value of Proxy-Authorization for the user and token of a URL; "" for none.
func basic(u *url.URL) string {
	if u.User == nil {
		return ""
	}
	password, _ := u.User.Password()
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password))
}

// call is what the options of one call come to.
type call struct {
	requestID  string
	supersedes string
	reason     string
	retryOf    string // the action of which the submissions are further attempts by now
	retryID    string // the request id of that action
	err        error
}

// CallOption changes one call.
type CallOption func(*call)

// UnsafeRepeat lets the call repeat an action whose outcome is not known, or is a
// failure that cannot tell what was done: the visibly unsafe code of CONTRACT O3. The
// proxy otherwise refuses an equal request with DUPLICATE_SUSPECTED. id is that action
// ("act_…"); reason says to readers of the code and of the log why a second effect is
// acceptable or impossible – "looked in the dashboard: no such charge" – and must not
// be empty. It stays on this side.
func UnsafeRepeat(id, reason string) CallOption {
	return func(c *call) {
		c.supersedes, c.reason = id, strings.TrimSpace(reason)
		switch {
		case !actionID(id):
			c.err = fmt.Errorf("client: UnsafeRepeat: not an action id: %w", ErrOption)
		case c.reason == "":
			c.err = fmt.Errorf("client: UnsafeRepeat: it needs a reason: %w", ErrOption)
		}
	}
}

// maxRequestIDBytes leaves room for the number of a repeat.
const maxRequestIDBytes = 120

// RequestID sets the Waybill-Request-Id of the call: 1 to 120 visible ASCII characters
// that the caller uses once. Repeats get "-2", "-3", … at its end. Without it the
// client makes one. A request that carries the field itself is taken to set it.
func RequestID(id string) CallOption {
	return func(c *call) {
		c.requestID = id
		if !visible(id) || len(id) > maxRequestIDBytes {
			c.err = fmt.Errorf("client: RequestID: 1 to %d visible ASCII characters: %w", maxRequestIDBytes, ErrOption)
		}
	}
}

type optionsKey struct{}

// WithOptions gives options to the calls that are made with the context, for those
// that go through a vendor's library.
func WithOptions(ctx context.Context, opts ...CallOption) context.Context {
	if earlier, ok := ctx.Value(optionsKey{}).([]CallOption); ok {
		opts = append(append([]CallOption{}, earlier...), opts...)
	}
	return context.WithValue(ctx, optionsKey{}, opts)
}

// callOf collects the options of one call.
func callOf(req *http.Request, opts []CallOption) (*call, error) {
	c := &call{}
	if v := req.Header["Waybill-Request-Id"]; len(v) == 1 {
		RequestID(v[0])(c)
	}
	if inherited, ok := req.Context().Value(optionsKey{}).([]CallOption); ok {
		for _, o := range inherited {
			o(c)
		}
	}
	for _, o := range opts {
		o(c)
	}
	if c.err == nil && len(req.Header["Waybill-Supersedes"]) > 0 {
		c.err = fmt.Errorf("client: %w", ErrSupersedes)
	}
	if c.err == nil && (req.URL.Scheme != "http" && req.URL.Scheme != "https" || req.URL.Host == "") {
		c.err = fmt.Errorf("client: the request needs an http or https URL with a host: %w", ErrOption)
	}
	if c.requestID == "" {
		c.requestID = "go_" + rand.Text()
	}
	return c, c.err
}

// submissionID is the request id of the n-th submission of the call, from 1.
func (c *call) submissionID(n int) string {
	if n == 1 {
		return c.requestID
	}
	return fmt.Sprintf("%s-%d", c.requestID, n)
}

// reportedID is the request id that leads to the action of the n-th submission. A further
// attempt is found by the token of its action: the first submission's.
func (c *call) reportedID(n int) string {
	if c.retryOf != "" {
		return c.retryID
	}
	return c.submissionID(n)
}

func visible(s string) bool {
	for _, b := range []byte(s) {
		if b <= ' ' || b > '~' {
			return false
		}
	}
	return s != ""
}

// actionID reports whether s has the form of an action's id: "act_" and a ULID.
func actionID(s string) bool {
	rest, ok := strings.CutPrefix(s, "act_")
	if !ok || len(rest) != 26 {
		return false
	}
	return strings.Trim(rest, "0123456789ABCDEFGHJKMNPQRSTVWXYZ") == ""
}
