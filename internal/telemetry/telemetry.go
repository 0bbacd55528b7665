// Package telemetry exports what became of actions as OpenTelemetry traces over
// OTLP/HTTP. It owns the SDK: nothing else imports it, and nothing waits for it. A span
// is made after the fact, from what is durable in the journal; it holds facts and names
// of routes, and no host, path, field or text of a request (CONTRACT C2, S2).
package telemetry

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// queueLength bounds what waits for the exporter; what does not fit is dropped.
const queueLength = 4096

// exportLimit bounds one request to the collector.
const exportLimit = 10 * time.Second

// Span is one action, or one attempt of it.
type Span struct {
	Action     [16]byte // the ULID in the action's id; without a Parent it is the trace id, too
	Parent     Parent   // the caller's span that the action belongs below; zero: none
	ID         string   // act_…
	Attempt    int      // from 1; 0: the action itself
	Route      string
	Phase      string
	Outcome    string
	Retry      string // of an action
	Code       string // "": a success
	Stage      string // of an attempt: how far connecting got
	Start, End time.Time
}

// Exporter sends spans. The nil Exporter drops them. It is safe for concurrent use.
type Exporter struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	queue    chan Span
	done     chan struct{}
	once     sync.Once
	stop     chan struct{}
}

// Start begins to export to an OTLP/HTTP endpoint such as http://127.0.0.1:4318; without
// a path it is /v1/traces. onError is called, without a text, when a batch was lost.
func Start(ctx context.Context, endpoint, version string, onError func()) (*Exporter, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
		return nil, fmt.Errorf("not the URL of an OTLP/HTTP endpoint; write for example http://127.0.0.1:4318")
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = "/v1/traces"
	}
	// Before anything of the SDK runs: its own texts quote the variables that it cannot read,
	// which hold keys, and answers of the collector (C2).
	otel.SetLogger(logr.Discard())
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(error) { onError() }))
	// A redirect would take the configured fields to whom the collector names. The
	// variables of the environment choose no proxy here either (case CL-01).
	hc := &http.Client{Transport: &http.Transport{Proxy: nil}, Timeout: exportLimit,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	client, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(u.String()), otlptracehttp.WithHTTPClient(hc))
	if err != nil {
		return nil, fmt.Errorf("the exporter cannot be made")
	}
	e := &Exporter{
		provider: sdktrace.NewTracerProvider(
			sdktrace.WithBatcher(client), sdktrace.WithIDGenerator(ids{}), sdktrace.WithSampler(sdktrace.AlwaysSample()),
			sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", "waybill"), attribute.String("service.version", version))),
		),
		queue: make(chan Span, queueLength), done: make(chan struct{}), stop: make(chan struct{}),
	}
	e.tracer = e.provider.Tracer("waybill")
	go e.run()
	return e, nil
}

// Record takes a span and never waits.
func (e *Exporter) Record(s Span) {
	if e == nil {
		return
	}
	select {
	case e.queue <- s:
	default: // a trace is worth less than the request
	}
}

// Close sends what waits, as far as ctx allows.
func (e *Exporter) Close(ctx context.Context) error {
	if e == nil {
		return nil
	}
	e.once.Do(func() { close(e.stop) })
	<-e.done
	return e.provider.Shutdown(ctx)
}

func (e *Exporter) run() {
	defer close(e.done)
	for {
		select {
		case s := <-e.queue:
			e.span(s)
		case <-e.stop:
			for len(e.queue) > 0 {
				e.span(<-e.queue)
			}
			return
		}
	}
}

// spanID is derived, so that an attempt finds its action's span whichever is sent first.
func spanID(action [16]byte, attempt int) (id trace.SpanID) {
	sum := sha256.Sum256(append(action[:], strconv.Itoa(attempt)...))
	copy(id[:], sum[:])
	return id
}

type fixed struct {
	trace trace.TraceID
	span  trace.SpanID
}

type fixedKey struct{}

// ids gives spans the ids that their context names.
type ids struct{}

// NewIDs implements sdktrace.IDGenerator.
func (ids) NewIDs(ctx context.Context) (trace.TraceID, trace.SpanID) {
	f, _ := ctx.Value(fixedKey{}).(fixed)
	return f.trace, f.span
}

// NewSpanID implements sdktrace.IDGenerator.
func (ids) NewSpanID(ctx context.Context, _ trace.TraceID) trace.SpanID {
	f, _ := ctx.Value(fixedKey{}).(fixed)
	return f.span
}

func (e *Exporter) span(s Span) {
	f := fixed{trace: trace.TraceID(s.Action), span: spanID(s.Action, s.Attempt)}
	if !s.Parent.IsZero() {
		f.trace = trace.TraceID(s.Parent.Trace)
	}
	ctx := context.WithValue(context.Background(), fixedKey{}, f)
	name, kind := "action", trace.SpanKindServer
	attrs := []attribute.KeyValue{
		attribute.String("waybill.action", s.ID), attribute.String("waybill.route", s.Route),
		attribute.String("waybill.phase", s.Phase), attribute.String("waybill.outcome", s.Outcome),
	}
	if s.Code != "" {
		attrs = append(attrs, attribute.String("waybill.code", s.Code))
	}
	if s.Attempt > 0 {
		name, kind = "attempt", trace.SpanKindClient
		attrs = append(attrs, attribute.Int("waybill.attempt", s.Attempt))
		if s.Stage != "" {
			attrs = append(attrs, attribute.String("waybill.stage", s.Stage))
		}
		ctx = trace.ContextWithSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{
			TraceID: f.trace, SpanID: spanID(s.Action, 0), TraceFlags: trace.FlagsSampled,
		}))
	} else {
		if !s.Parent.IsZero() {
			ctx = trace.ContextWithRemoteSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{TraceID: f.trace, SpanID: trace.SpanID(s.Parent.Span)}))
		}
		attrs = append(attrs, attribute.String("waybill.retry", s.Retry))
	}
	_, span := e.tracer.Start(ctx, name, trace.WithTimestamp(s.Start), trace.WithSpanKind(kind), trace.WithAttributes(attrs...))
	if s.Code != "" {
		span.SetStatus(codes.Error, s.Code)
	}
	span.End(trace.WithTimestamp(s.End))
}
