package dispatch

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	mrand "math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"
	"golang.org/x/crypto/ssh"
	"golang.org/x/net/http/httpguts"

	"waybill/inject"
	"waybill/internal/control"
	"waybill/internal/killpoint"
	"waybill/metrics"
	"waybill/outcome"
	"waybill/routes"
)

// Clock tells the time. Times are for people and limits, never for order (M3).
type Clock interface{ Now() time.Time }

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

// Binding is one immutable configuration: an action uses the one it was bound to
// from its validation to its dispatch (CONTRACT D1).
type Binding struct {
	Snapshot    *routes.Snapshot
	Credentials *inject.Store
}

// Config wires a Pipeline.
type Config struct {
	Journal   Journal
	Transport Transport
	SSH       Transport // of commands; nil: they are refused
	Binding   *Binding
	Metrics   *metrics.Metrics // nil: none
	Logger    *slog.Logger     // nil: none
	Clock     Clock            // nil: the system's
	// Pseudonym names this proxy in Via (RFC 9110 §7.6.3); "": "waybill".
	Pseudonym string
	// OnApproval is called, in a goroutine of its own, when a person is asked (D4); nil: nobody is told.
	OnApproval func(ApprovalView)
	// OnTrace is called, before anything of the action is on record, with the caller's
	// traceparent field (W3C Trace Context), where there is exactly one. Its text is the
	// caller's and unchecked; what is called keeps no request waiting. nil: nobody asks.
	OnTrace func(id ActionID, traceparent string)
	// SpoolDir holds unlinked temporary files of large request bodies; "": the system's.
	SpoolDir string
}

// Pipeline carries actions. It is safe for concurrent use.
type Pipeline struct {
	cfg       Config
	binding   atomic.Pointer[Binding]
	templates sync.Map // text → *inject.Template
	guards    guards
	runners   runners

	mu       sync.Mutex
	draining bool
	running  sync.WaitGroup
	claims   map[claim]ActionID // request ids of actions that have no record yet
	cards    map[ActionID]*card // approvals whose caller waits
	drains   chan struct{}      // closed by Drain
	throttle throttle
	entropy  *ulid.MonotonicEntropy

	follow followUps

	windowOnce sync.Once
	window     *windowClock
	endings    moments // of actions that guard against repeats
	relays     moments // of redirects to other origins
	engine     atomic.Pointer[background]
	ending     chan struct{} // closed when draining begins
	began      time.Time     // carries the monotonic clock
}

type claim struct{ caller, requestID string }

// New returns a Pipeline.
func New(cfg Config) *Pipeline {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Clock == nil {
		cfg.Clock = systemClock{}
	}
	if cfg.Pseudonym == "" {
		cfg.Pseudonym = "waybill"
	}
	p := &Pipeline{cfg: cfg, claims: make(map[claim]ActionID), cards: make(map[ActionID]*card), drains: make(chan struct{}), entropy: ulid.Monotonic(rand.Reader, 0), ending: make(chan struct{}), began: time.Now()}
	p.binding.Store(cfg.Binding)
	return p
}

// Swap binds new actions to b; those that are on their way keep theirs (D1).
func (p *Pipeline) Swap(b *Binding) {
	p.binding.Store(b)
	p.guards.forget()
}

// Binding returns what new actions are bound to.
func (p *Pipeline) Binding() *Binding { return p.binding.Load() }

// Drain refuses new actions with DRAINING and waits until every running one has
// ended or ctx ends, whose error it returns then.
func (p *Pipeline) Drain(ctx context.Context) error {
	p.mu.Lock()
	if !p.draining {
		close(p.ending)
		close(p.drains)
	}
	p.draining = true
	p.mu.Unlock()
	done := make(chan struct{})
	go func() {
		p.running.Wait()
		p.runners.dismiss()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("dispatch: drain: %w", ctx.Err())
	}
}

// enter counts an action in, or reports that the pipeline drains.
func (p *Pipeline) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining {
		return false
	}
	p.running.Add(1)
	return true
}

func (p *Pipeline) newID() ActionID {
	p.mu.Lock()
	defer p.mu.Unlock()
	ms := ulid.Timestamp(p.cfg.Clock.Now())
	id, err := ulid.New(ms, p.entropy)
	if err != nil {
		// Monotonic entropy overflowed inside one millisecond; plain entropy cannot.
		id = ulid.MustNew(ms, rand.Reader)
	}
	return ActionID(id)
}

// action is one submission on its way. Until run starts it belongs to the caller's
// goroutine, from then on to run.
type action struct {
	p          *Pipeline
	s          *Submission
	id         ActionID
	start      time.Time
	mark       time.Time // start of the current stage
	binding    *Binding
	route      *routes.Route
	addressed  routes.Target
	out        *Outgoing
	body       *spool
	print      string
	seal       [32]byte
	credential *Credential       // what authorise decided; nil: nothing is injected
	resolved   []inject.Resolved // of each credential one version for the whole action
	// certificate is presented to the origin when it asks for one; nil: none.
	certificate *tls.Certificate
	secrets     []string // what was attached, in every form, to keep it out of answers and evidence
	identity    string
	repeatable  bool
	advice      outcome.Retry
	events      []Event
	room        []Event // the array of events, where it has one more in front; see add
	tries       int
	followed    int     // redirects within the origin (R2)
	late        []Event // tries that failed after an answer was there
	setup       *SetupError
	// For the route's upstream proxy: the field value, and the credential's id and version.
	proxyAuthorization, proxyVersion string
	claimed                          bool
	accepted                         Accepted
	recorded                         bool   // ACTION_ACCEPTED was appended
	started                          Record // the projection with DISPATCH_STARTED
	noted                            bool   // the local cause is on record

	slot       *use          // what it counts against (V4)
	retryAfter time.Duration // of a refusal

	asks     bool   // a person has to approve it (D3)
	asked    bool   // its approval is on record: whatever happens here, it may be sent later (D4)
	approved string // the approval's fingerprint, once the request was compared with it
	detached bool   // no caller waits: approved after its caller was told APPROVAL_PENDING

	// news tells the caller's own goroutine of a reply or an interim (see await). It holds one.
	news chan struct{}

	caller context.Context //nolint:containedctx // the caller's own, for a streamed answer
	waits  time.Time       // until then; zero: as long as the route allows

	mu          sync.Mutex
	left        bool // the caller does not wait any more
	cause       string
	undelivered bool // a streamed answer did not reach its caller
	settled     bool // the attempt's ending is on record
	reply       *Reply
	interims    []interim // 1xx answers, for the caller's own goroutine

	committed bool // its result is stored; set before settled

	recall *Recall // what may be asked for later (K6)

	// Of repeats; see repeat.go.
	key         *Key
	conditional string
	further     *Record       // an attempt is added to this action
	early       *Reply        // the answer is on record already
	purpose     string        // of the lease
	generation  int           // of the lease; 0 is the first
	base        int           // attempts on record before this one
	kept        []byte        // the request, with its dispatch record
	leaving     chan struct{} // closed when the caller left; nil: nobody asks

	// Of a command; see exec.go.
	command     *routes.CommandMatch
	execEnv     []EnvVar
	execMarker  *EnvVar // WAYBILL_ACTION_ID: of this action, so no part of the fingerprint
	signers     []ssh.Signer
	jumpSigners []ssh.Signer
	over        chan struct{} // closed with ending, of streamed output; nil: not a command
	ending      *Reply
}

// interim is a 1xx answer on its way to the caller (CONTRACT G4).
type interim struct {
	status int
	header http.Header
}

// maxInterims bounds those that wait for a slow caller; more are dropped.
const maxInterims = 16

func (a *action) now() time.Time { return a.p.cfg.Clock.Now() }

func (a *action) add(ev Event) {
	ev.At = a.now()
	if a.events == nil {
		// What most appends hold, and in front of the first one ACTION_ACCEPTED.
		if a.recorded {
			a.events = make([]Event, 0, 4)
		} else {
			a.room = make([]Event, 1, 4)
			a.events = a.room[1:]
		}
	}
	a.events = append(a.events, ev)
}

func (a *action) stage(s metrics.Stage) {
	now := time.Now()
	a.p.cfg.Metrics.Stage(s, now.Sub(a.mark))
	a.mark = now
}

// Do carries one submission from bound to delivered. ctx is the caller's: before
// dispatch its end stops the action (F10), afterwards it only ends the wait (F5).
// The reply is never nil.
func (p *Pipeline) Do(ctx context.Context, s *Submission) *Reply {
	a := &action{p: p, s: s, id: p.newID(), start: time.Now(), news: make(chan struct{}, 1)}
	if s.Exec != nil {
		a.over = make(chan struct{})
	}
	a.mark, a.caller = a.start, ctx
	a.accepted = Accepted{Caller: s.Caller.ID, RequestID: s.RequestID, Method: s.Method, Protocol: s.Protocol}
	p.cfg.Metrics.InFlight(1)
	if !p.enter() {
		defer p.cfg.Metrics.InFlight(-1)
		defer a.unclaim()
		return a.refuse(refusal(outcome.CodeDraining, "", "draining", ""))
	}
	a.trace()
	handed := false
	defer func() {
		if !handed {
			a.close()
		}
	}()
	if r := a.prepare(ctx); r != nil {
		return r
	}
	if s.Wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.Wait)
		defer cancel()
		a.waits, _ = ctx.Deadline()
	}
	conn, r := a.connect(ctx)
	if r != nil {
		return r
	}
	if r := a.record(ctx, conn); r != nil {
		return r
	}
	handed = true
	if a.route.Contract.Retry != nil {
		a.leaving = make(chan struct{})
	}
	p.runners.start(a, conn)
	return a.await(ctx)
}

// trace tells whose trace the action, or this attempt of it, belongs to.
func (a *action) trace() {
	if a.p.cfg.OnTrace == nil {
		return
	}
	if v := a.s.Header.Values("Traceparent"); len(v) == 1 {
		a.p.cfg.OnTrace(a.id, v[0])
	}
}

// close ends the action's books: spooled body, claims, counters.
func (a *action) close() {
	a.body.close()
	a.vacate()
	a.unclaim()
	a.p.cfg.Metrics.InFlight(-1)
	a.p.running.Done()
}

// unclaim gives the request id free: the journal knows who has it.
func (a *action) unclaim() {
	if a.claimed {
		a.p.mu.Lock()
		delete(a.p.claims, claim{a.s.Caller.ID, a.s.RequestID})
		a.p.mu.Unlock()
	}
}

// prepare does everything up to the built request: validation, binding, duplicate
// guard, secret. It returns a reply when the action ends here.
func (a *action) prepare(ctx context.Context) *Reply {
	if a.s.Refused != nil {
		if a.s.Exec != nil {
			_ = a.aimExec(ctx) // for the record: whom it was meant for
		}
		return a.refuse(a.s.Refused)
	}
	if err := a.p.cfg.Journal.Admit(); err != nil {
		return a.journalUnavailable(outcome.Validation, err)
	}
	a.binding = a.p.binding.Load()
	steps, secret := []func(context.Context) *Refusal{a.aim, a.choose, a.limit, a.internal, a.followsRedirect, a.claim, a.spool, a.repeats, a.guard, a.keep, a.remember}, []func(context.Context) *Refusal{a.authorise, a.attach}
	if a.s.Exec != nil {
		steps = []func(context.Context) *Refusal{a.aimExec, a.chooseExec, a.limit, a.claim, a.spoolExec, a.guard}
		secret = []func(context.Context) *Refusal{a.authoriseExec, a.attachExec}
	}
	for _, step := range steps {
		if refused := step(ctx); refused != nil {
			if ctx.Err() != nil && refused.Reason == reasonBodyBroken {
				refused = a.cancelled(outcome.Validation)
			}
			return a.refuse(refused)
		}
		if a.early != nil {
			return a.early
		}
	}
	a.asks = a.route.NeedsApproval(a.s.Method, a.s.RawPath, a.out.Length)
	if a.further != nil {
		if a.asks {
			return a.refuse(refusal(outcome.CodeSnapshotMismatch, "", "approval_needed", "A person has to approve each request on this route, repeats too: send it as a new one."))
		}
		if r := a.lease(); r != nil {
			return r
		}
	} else {
		a.add(Event{Type: PreflightValidated, Bound: a.binds()})
	}
	a.stage(metrics.StageAccept)
	steps = secret
	if a.asks {
		// A person decides between the two, about what was authorised.
		if r := a.approve(ctx); r != nil {
			return r
		}
		steps = steps[1:]
	}
	for _, step := range steps {
		if refused := step(ctx); refused != nil {
			if gone(ctx) {
				// What the store said while its context ended is not why this action stops (F10).
				refused = a.cancelled(outcome.CredentialInjection)
			}
			return a.refuse(refused)
		}
	}
	if a.further != nil && !a.sameCredential() {
		return a.refuse(refusal(outcome.CodeSnapshotMismatch, "", "credential_changed", "The route has another credential than the action used: another account may know nothing of it."))
	}
	a.stage(metrics.StageCredential)
	return nil
}

// aim finds the one canonical target of the request (CONTRACT B1, DESIGN 1.2).
func (a *action) aim(context.Context) *Refusal {
	s := a.s
	invalid := func(field, reason, detail string) *Refusal {
		return refusal(outcome.CodeInvalidTarget, field, reason, detail)
	}
	if !httpguts.ValidHeaderFieldName(s.Method) {
		// Nothing of it is recorded: it may be the rest of another message.
		s.Method, a.accepted.Method = "", ""
		return refusal(outcome.CodeInvalidRequest, "request.method", "bad_method", "The method is not a token.")
	}
	if s.Scheme != "http" && s.Scheme != "https" {
		return invalid("request.target.scheme", "scheme", "Only http and https targets are carried.")
	}
	def := routes.DefaultPort(s.Scheme)
	names := []struct{ text, field string }{
		{s.Authorities.Connect, "connect.target"}, {s.Authorities.URL, "request.target"}, {s.Authorities.Host, "request.headers.host"},
	}
	var (
		host  string
		port  int
		found bool
	)
	for _, n := range names {
		if n.text == "" {
			continue
		}
		h, prt, err := routes.ParseAuthority(n.text, def)
		if err != nil {
			var bad *routes.AuthorityError
			reason := "authority"
			if errors.As(err, &bad) {
				reason = bad.Reason
			}
			return invalid(n.field, reason, "The destination is not a plain host name or address.")
		}
		if !found {
			host, port, found = h, prt, true
			continue
		}
		if h != host || prt != port {
			return invalid(n.field, "authority_mismatch", "The names of the destination disagree; they must all be the same host and port.")
		}
	}
	if !found {
		return invalid("request.headers.host", "no_authority", "The request names no destination.")
	}
	if s.Authorities.SNI != "" {
		h, err := routes.ParseHost(s.Authorities.SNI)
		if err != nil || h != host {
			return invalid("tls.server_name", "authority_mismatch", "The TLS server name and the destination disagree; they must be the same host.")
		}
	}
	if s.RawPath == "" {
		s.RawPath = "/"
	}
	a.addressed = routes.Target{Scheme: s.Scheme, Host: host, Port: port}
	a.out = &Outgoing{Method: s.Method, Target: a.addressed, Authority: authority(a.addressed), RawPath: s.RawPath, RawQuery: s.RawQuery, HasQuery: s.HasQuery}
	a.accepted.Target = shownTarget(a.out)
	if s.RawPath == "*" && (s.Method != http.MethodOptions || s.HasQuery) {
		return invalid("request.target.path", "asterisk_form", "The target \"*\" goes with OPTIONS only.")
	}
	if err := routes.CheckPath(s.RawPath); err != nil {
		var bad *routes.PathError
		reason := "path"
		if errors.As(err, &bad) {
			reason = bad.Reason
		}
		// The path is not recorded: it is what another reader might take for something else.
		a.out.RawPath = "/"
		a.accepted.Target = shownTarget(a.out)
		return invalid("request.target.path", reason, "The path can be read in more than one way; write it without dot segments, backslashes and empty first segments.")
	}
	if !s.HasQuery && s.RawQuery != "" || !plainQuery(s.RawQuery) {
		// net/http writes the query as it is: a space would end the request target, and
		// what follows be read as something else (RFC 9112 §3).
		a.out.HasQuery = false
		a.accepted.Target = shownTarget(a.out)
		return invalid("request.target.query", "forbidden_character", "The query holds a byte that must be percent-encoded.")
	}
	return nil
}

// plainQuery reports whether a query can be sent as it is (RFC 3986 §3.4, without the
// bytes outside ASCII and "#").
func plainQuery(q string) bool {
	for i := range len(q) {
		if q[i] <= ' ' || q[i] >= 0x7f || q[i] == '#' {
			return false
		}
	}
	return true
}

// authority is the Host field of a target: the default port is left out (RFC 9110 §7.2).
func authority(t routes.Target) string {
	if t.Port == routes.DefaultPort(t.Scheme) {
		full := t.Authority()
		return full[:strings.LastIndexByte(full, ':')]
	}
	return t.Authority()
}

// choose binds the route (CONTRACT V1, V4).
func (a *action) choose(context.Context) *Refusal {
	r, miss := a.binding.Snapshot.Match(a.s.Method, a.addressed, a.s.RawPath)
	if r == nil {
		return refusal(miss.Code(), miss.Field(), miss.Kind.String(), miss.Detail(a.s.Caller.Name))
	}
	a.route = r
	switch {
	case r.Deny:
		return refusal(outcome.CodePolicyDenied, "request.target", "denied_by_route", "A route forbids this destination.")
	case !r.AllowsCaller(a.s.Caller.Name):
		return refusal(outcome.CodePolicyDenied, "", "caller_not_allowed", "This caller may not use the route.")
	}
	target, ok := r.Dial(a.addressed)
	if !ok {
		return refusal(outcome.CodeInvalidTarget, "request.target.scheme", "plaintext", "This route is reached over https only; address it with https.")
	}
	header, refused := outgoingHeader(a.s, r, a.p.cfg.Pseudonym)
	if refused != nil {
		return refused
	}
	a.out.Target, a.out.Header = target, header
	if target != a.addressed {
		a.out.Authority = authority(target)
	}
	if refused := a.takeover(); refused != nil {
		return refused
	}
	a.out.Idle, a.out.MaxBody, a.out.CloseDelimited = r.Limits.Idle, r.Limits.Response, r.Contract.CloseDelimited
	a.out.Upgrade = strings.Join(header["Upgrade"], "")
	if target != a.addressed || a.out.RawQuery != a.s.RawQuery || a.out.HasQuery != a.s.HasQuery {
		a.accepted.Target = shownTarget(a.out)
	}
	a.repeatable = r.Repeatable(a.s.Method)
	a.conditions()
	a.advice = outcome.ByContract(a.repeatable, false)
	return nil
}

// claim holds the caller's request id for this action (DESIGN section 4).
func (a *action) claim(ctx context.Context) *Refusal {
	if a.s.RequestID == "" || a.s.RetryOf != "" {
		return nil // a further attempt is found by the token of its action
	}
	key := claim{a.s.Caller.ID, a.s.RequestID}
	earlier, taken := a.hold(key)
	id, err := a.p.cfg.Journal.ByRequestID(ctx, key.caller, key.requestID)
	switch {
	case err == nil:
		return a.exists(id)
	case !errors.Is(err, ErrActionNotFound):
		return a.unreadable(err)
	case !taken:
		return nil
	}
	// The action has no record yet that could be fetched.
	r := a.exists(earlier)
	f, _ := outcome.Of(outcome.CodeInvocationInProgress)
	r.Facts, r.Detail = f, "An action with this Waybill-Request-Id is on its way."
	return r
}

// hold takes the request id for this action, or returns the running one that has it.
func (a *action) hold(key claim) (earlier ActionID, taken bool) {
	a.p.mu.Lock()
	defer a.p.mu.Unlock()
	if id, ok := a.p.claims[key]; ok && id != a.id {
		return id, true
	}
	a.p.claims[key] = a.id
	a.claimed = true
	return ActionID{}, false
}

func (a *action) exists(earlier ActionID) *Refusal {
	// The token stays with the action that has it.
	a.accepted.RequestID = ""
	r := refusal(outcome.CodeInvocationExists, "request.headers.waybill-request-id", "request_id_taken", "An action with this Waybill-Request-Id exists.")
	r.Earlier = earlier
	return r
}

func (a *action) unreadable(err error) *Refusal {
	a.p.cfg.Logger.Error("journal cannot be read", slog.String("action", a.id.String()), slog.Any("err", err))
	return refusal(outcome.CodeJournalUnavailable, "", "journal_unreadable", "")
}

const reasonBodyBroken = "body_incomplete"

// spool takes in the whole body: the fingerprint covers it (D1).
func (a *action) spool(context.Context) *Refusal {
	if a.s.Body == nil {
		a.out.Header.Del("Expect")
		a.print = fingerprint(a.out, nil)
		return nil
	}
	if refused := a.spoolBody(); refused != nil {
		return refused
	}
	if a.body.length == 0 {
		a.out.Header.Del("Expect") // there is nothing to wait with
	}
	if a.body.length > 0 || a.s.ContentLength != 0 || carriesBody(a.s.Method) {
		a.out.Body = bodyOf(a.body)
	}
	a.print = fingerprint(a.out, a.body)
	return nil
}

// spoolBody holds the submission's body.
func (a *action) spoolBody() *Refusal {
	l := a.route.Limits
	tooLong := func() *Refusal {
		return refusal(outcome.CodePayloadLimit, "request.body", "body_limit", fmt.Sprintf("The body is longer than the %d bytes that the route allows.", l.Request))
	}
	if a.s.ContentLength > l.Request {
		return tooLong()
	}
	body, err := spoolBody(a.s.Body, a.s.ContentLength, l.Buffer, l.Request, a.p.cfg.SpoolDir)
	switch {
	case err == nil:
	case errors.Is(err, errBodyLimit):
		return tooLong()
	case errors.Is(err, errSpool):
		a.p.cfg.Logger.Error("request body cannot be spooled", slog.String("action", a.id.String()), slog.Any("err", err))
		return &Refusal{Facts: outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeJournalUnavailable},
			Reason: "spool_failed", Detail: "The request body could not be held on disk."}
	default:
		return refusal(outcome.CodeInvalidRequest, "request.body", reasonBodyBroken, "The body ended before it was complete.")
	}
	a.body = body
	if a.s.ContentLength >= 0 && body.length != a.s.ContentLength {
		return refusal(outcome.CodeInvalidRequest, "request.body", reasonBodyBroken, "The body has another length than the request says.")
	}
	a.out.Length = body.length
	return nil
}

// carriesBody tells methods whose requests have a length even when it is zero.
func carriesBody(method string) bool {
	return method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch
}

// guard refuses a suspected duplicate (CONTRACT O3).
func (a *action) guard(ctx context.Context) *Refusal {
	if a.repeatable || a.further != nil || control.Off("O3-duplicate-guard") {
		return nil
	}
	rec, err := a.p.cfg.Journal.Guarding(ctx, a.s.Caller.ID, a.print)
	switch {
	case errors.Is(err, ErrActionNotFound):
		return nil
	case err != nil:
		return a.unreadable(err)
	case !rec.GuardsRepeats(), rec.ID.String() == a.s.Supersedes, a.key != nil && a.key.Replaces == rec.ID.String():
		return nil
	}
	// A clock that was set keeps the guard up, whichever way.
	if a.p.endedFor(&rec) > a.route.Limits.Duplicates {
		return nil
	}
	r := refusal(outcome.CodeDuplicateSuspected, "request.headers.waybill-supersedes", "duplicate", "An equal request has an outcome that is not settled; naming it in Waybill-Supersedes sends this one all the same.")
	if a.s.Exec != nil {
		r.Field, r.Detail = "request.env."+EnvSupersedes, "An equal command has an outcome that is not settled; naming it in "+EnvSupersedes+" runs this one all the same."
	}
	r.Earlier = rec.ID
	return r
}

func (a *action) sealNow() [sha256.Size]byte {
	if a.out.Exec != nil {
		return sealExec(a.out, a.execEnv, a.body, a.identity, a.binding.Snapshot.Digest())
	}
	return sealOf(a.out, a.body, nil, a.identity, a.binding.Snapshot.Digest())
}

// template parses a route's template once; there are as many as the configurations of
// this process have held.
func (p *Pipeline) template(text string) (*inject.Template, error) {
	if t, ok := p.templates.Load(text); ok {
		return t.(*inject.Template), nil //nolint:forcetypeassert // the map holds nothing else
	}
	t, err := inject.ParseTemplate(text)
	if err == nil {
		p.templates.Store(text, t)
	}
	return t, err
}

func join(list, item string) string {
	if list == "" {
		return item
	}
	return list + "," + item
}

func (a *action) cancelled(phase outcome.Phase) *Refusal {
	return &Refusal{Facts: outcome.Facts{Phase: phase, Outcome: outcome.NotAttempted, Retry: outcome.AfterCorrection, Code: outcome.CodeCallerCancelled}, Reason: "caller_gone"}
}

// gone reports whether the caller left, as opposed to its Waybill-Timeout passing.
func gone(ctx context.Context) bool {
	return ctx.Err() != nil && !errors.Is(context.Cause(ctx), context.DeadlineExceeded)
}

// Rest limits of pooled connections: see Order.MaxRest.
const (
	restRepeatable = time.Minute
	restUnsafe     = 3 * time.Second
)

// connect makes the connection, in bounded and recorded tries (CONTRACT E7, E8).
func (a *action) connect(ctx context.Context) (Conn, *Reply) {
	order := a.order(a.out.Target, restUnsafe)
	if a.repeatable {
		order.MaxRest = restRepeatable
	}
	l := a.route.Limits
	transport := a.p.cfg.Transport
	whole := ctx // what all tries have together
	if a.out.Exec != nil {
		order.Exec, transport = a.execOrder(), a.p.cfg.SSH
		// One deadline for everything up to authentication (case SH-05).
		var cancel context.CancelFunc
		whole, cancel = context.WithTimeout(ctx, l.Connect)
		defer cancel()
	}
	for {
		a.tries++
		conn, err := connectWithin(whole, l.Connect, transport, order)
		if err == nil {
			a.stage(metrics.StageConnect)
			return conn, nil
		}
		if gone(ctx) {
			return nil, a.refuse(a.cancelled(outcome.ConnectionSetup))
		}
		a.setup = setupError(err)
		f := setupFacts(a.setup)
		a.p.cfg.Logger.Debug("connection setup failed", slog.String("action", a.id.String()), slog.String("code", f.Code.String()), slog.Any("stage", string(a.setup.Stage)), slog.Any("reason", a.setup.Reason))
		if !control.Off("E7-every-try-recorded") {
			a.add(Event{Type: AttemptFailed, Attempt: a.tries, Ended: &Ended{Facts: f, Stage: a.setup.Stage, Reason: a.setup.Reason, Source: outcome.TransportObserved, Peer: a.setup.Peer,
				Hop: a.setup.Hop, HopStatus: a.setup.HopStatus, ProxyStatus: a.setup.ProxyStatus}})
		}
		if a.setup.Final || f.Retry != outcome.Backoff || a.tries-a.base >= l.Tries || whole.Err() != nil || !pause(whole, a.tries-a.base) {
			if gone(ctx) {
				return nil, a.refuse(a.cancelled(outcome.ConnectionSetup))
			}
			return nil, a.refuse(&Refusal{Facts: f, Reason: a.setup.Reason, Stage: a.setup.Stage, Detail: a.setup.Detail})
		}
	}
}

// connectWithin bounds the making of a connection, where one has to be made.
func connectWithin(ctx context.Context, limit time.Duration, t Transport, o *Order) (Conn, error) {
	if p, ok := t.(Pooler); ok {
		if c := p.Pooled(o); c != nil {
			return c, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return t.Connect(ctx, o)
}

// order is the connection that is wanted. The proxy's credential separates pools as the
// origin's does.
func (a *action) order(target routes.Target, rest time.Duration) *Order {
	identity := a.identity
	if a.proxyVersion != "" {
		identity += " proxy " + a.proxyVersion
	}
	return &Order{Target: target, Upstream: &a.route.Upstream, Identity: identity, Certificate: a.certificate, ProxyAuthorization: a.proxyAuthorization, MaxRest: rest, HTTP1: a.out.Upgrade != ""}
}

func setupError(err error) *SetupError {
	var s *SetupError
	if errors.As(err, &s) {
		return s
	}
	return &SetupError{Code: outcome.CodeConnectionLost, Reason: "setup_failed", Err: err}
}

func setupFacts(s *SetupError) outcome.Facts {
	f, ok := outcome.Of(s.Code)
	if !ok || f.Outcome != outcome.NotAttempted {
		f, _ = outcome.Of(outcome.CodeConnectionLost)
	}
	return f
}

// pause waits before the next try of connection setup: 100 ms, doubling, with
// jitter. It reports whether the wait was not cut short.
func pause(ctx context.Context, tries int) bool {
	d := 100 * time.Millisecond << min(tries-1, 5)
	d += mrand.N(d / 2)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// record makes DISPATCH_STARTED durable (CONTRACT F1, F9). When it returns nil the
// boundary counts as crossed.
func (a *action) record(ctx context.Context, conn Conn) *Reply {
	switch {
	case gone(ctx) && !control.Off("F10-gone-caller-stops"):
		conn.Release()
		return a.refuse(a.cancelled(outcome.ConnectionSetup))
	case ctx.Err() != nil && !gone(ctx):
		// The caller's own time is over: it would be told unknown of a request that is
		// still here.
		stage := conn.Info().Stage
		conn.Release()
		f, _ := outcome.Of(outcome.CodeConnectionTimeout)
		return a.refuse(&Refusal{Facts: f, Reason: "caller_timeout", Stage: stage, Detail: "The time the caller wanted to wait was over before the request was sent."})
	}
	// D2: the last look at what will be sent; nothing changes it from here on.
	if !control.Off("D2-seal-checked") && (a.sealNow() != a.seal || a.body != nil && !a.body.intact()) {
		conn.Release()
		return a.refuse(refusal(outcome.CodeSnapshotMismatch, "", "request_changed", "The request is not the one that was bound."))
	}
	relaxed := a.route.Durability == routes.Relaxed && a.repeatable && a.further == nil && !a.asks
	info := conn.Info()
	info.Unresolved, info.Approved = a.advice, a.approved
	if a.further != nil {
		info.Generation, info.Until, info.Credential = a.generation, a.p.windowNow().Add(a.route.Limits.Timeout), a.credential
		a.events = slices.DeleteFunc(a.events, func(ev Event) bool { return ev.Type == CredentialAuthorized })
	}
	a.accepted.Relaxed = relaxed
	a.add(Event{Type: DispatchStarted, Attempt: a.tries, Dispatch: &info})
	killpoint.At("dispatch-before-record")
	if control.Off("F1-durable-before-send") {
		relaxed = true
	}
	// From here on the caller cannot stop it: a record that becomes durable after its
	// caller left would stay open, unknown and without an attempt behind it (F9, M2).
	receipt, err := a.append(context.WithoutCancel(ctx), relaxed)
	a.kept = nil
	a.stage(metrics.StageRecord)
	switch {
	case err == nil:
		killpoint.At("dispatch-recorded")
		a.recorded = true
		a.started = receipt.Record
		return nil
	case errors.Is(err, ErrIndeterminate):
		// Whatever else the error wraps.
		return a.indeterminate(conn, err)
	case errors.Is(err, ErrRequestIDTaken):
		conn.Release()
		return a.refuse(a.exists(receipt.Earlier))
	case errors.Is(err, ErrKeyTaken):
		conn.Release()
		return a.lostKey(receipt.Earlier)
	case errors.Is(err, ErrLeaseLost), errors.Is(err, ErrRetryRefused):
		conn.Release()
		return a.leaseLost(outcome.ConnectionSetup, "")
	case errors.Is(err, ErrNotWritten):
		conn.Release()
		return a.journalUnavailable(outcome.ConnectionSetup, err)
	default:
		return a.indeterminate(conn, err)
	}
}

// indeterminate answers when the record may be on disk: nothing is handed over, and
// the answer does not contradict what may be found (F9).
func (a *action) indeterminate(conn Conn, err error) *Reply {
	conn.Release()
	a.p.cfg.Logger.Error("dispatch record is indeterminate", slog.String("action", a.id.String()), slog.Any("err", err))
	f, _ := outcome.Of(outcome.CodeJournalIndeterminate)
	return a.unrecorded(f, "journal_indeterminate")
}

// append hands the collected events to the journal. ACTION_ACCEPTED goes first.
func (a *action) append(ctx context.Context, relaxed bool) (Receipt, error) {
	events := a.events
	if !a.recorded {
		accepted := a.accepted
		first := Event{Type: ActionAccepted, At: a.start, Accepted: &accepted}
		if len(events) > 0 && a.room != nil && &events[0] == &a.room[:2][1] {
			events = a.room[:len(events)+1]
			events[0] = first
		} else {
			events = append(append(make([]Event, 0, len(events)+1), first), events...)
		}
	}
	r, err := a.p.cfg.Journal.Append(ctx, Batch{Action: a.id, Events: events, Request: a.keptWith(events), Relaxed: relaxed})
	if err == nil {
		a.events = nil
	}
	return r, err
}

// refuse ends an action before any boundary. The answer follows its durable record (M6).
func (a *action) refuse(r *Refusal) *Reply {
	if a.further != nil && a.generation > 0 {
		return a.refuseFurther(r)
	}
	keep := a.events
	// Events that belong to a dispatch which did not happen are not recorded.
	a.events = a.events[:0:0]
	for i := range keep {
		if keep[i].Type != DispatchStarted {
			a.events = append(a.events, keep[i])
		}
	}
	a.accepted.Relaxed = false
	ended := &Ended{Facts: r.Facts, Reason: r.Reason, Field: r.Field, Stage: r.Stage, Credential: r.credential}
	if a.route != nil {
		ended.Route = a.route.Name
	}
	if !r.Earlier.IsZero() {
		ended.EarlierAction = r.Earlier.String()
	}
	a.add(Event{Type: ActionRefused, Ended: ended})
	if a.accepted.RequestID != "" {
		if _, taken := a.hold(claim{a.s.Caller.ID, a.accepted.RequestID}); taken {
			// A refusal does not take the token away from the action that runs under it.
			a.accepted.RequestID = ""
		}
	}
	relaxed := control.Off("M6-refusal-durable-before-answer")
	// The caller may be gone; its record is written all the same.
	receipt, err := a.append(context.Background(), relaxed)
	if errors.Is(err, ErrRequestIDTaken) {
		a.accepted.RequestID = ""
		receipt, err = a.append(context.Background(), relaxed)
	}
	if err != nil {
		return a.journalUnavailable(r.Phase, err)
	}
	rec := receipt.Record
	reply := a.answer(rec, rec.Facts, r.Detail)
	reply.Gone = r.Code == outcome.CodeCallerCancelled
	a.log(rec, reply.Status)
	return reply
}

// journalUnavailable answers without a record (CONTRACT F9, M6): nothing was and
// nothing will be handed over.
func (a *action) journalUnavailable(phase outcome.Phase, err error) *Reply {
	a.p.cfg.Logger.Warn("journal unavailable", slog.String("action", a.id.String()), slog.Any("err", err))
	switch {
	case a.generation > 0:
		return a.asRecorded("The journal is unavailable; nothing of the further attempt was sent.")
	case a.asked:
		// The request is held: what could not be recorded here does not keep the decision,
		// or the next start, from sending it (D4).
		return a.asRecorded("")
	}
	f := outcome.Facts{Phase: phase, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeJournalUnavailable}
	return a.unrecorded(f, "journal_unavailable")
}

func (a *action) unrecorded(f outcome.Facts, reason string) *Reply {
	a.p.cfg.Metrics.Unrecorded(f.Code)
	rec := Record{ID: a.id, Caller: a.s.Caller.ID, Method: a.s.Method, Facts: f, Ended: true, AcceptedAt: a.start, Refusal: &Ended{Facts: f, Reason: reason}}
	ev := rec.Evidence()
	// Where the record may be on disk, no field of the answer denies it either (F9).
	ev.DispatchStarted = f.Outcome == outcome.Unknown
	return ownReply(a.id, rec, outcome.NewEnvelope(a.id.String(), f, "", ev), a.shape(&rec, f))
}

// await waits for run on behalf of the caller, and passes 1xx answers on: in the
// caller's own goroutine, so that one who does not read holds up nobody else (F5).
func (a *action) await(ctx context.Context) *Reply {
	for waiting := true; waiting; {
		select {
		case <-a.news:
			a.mu.Lock()
			interims, reply := a.interims, a.reply
			a.interims = nil
			a.mu.Unlock()
			for _, i := range interims {
				a.s.Informational(i.status, i.header)
			}
			if reply != nil {
				return reply
			}
		case <-ctx.Done():
			waiting = false
		}
	}
	a.mu.Lock()
	if a.reply != nil {
		a.mu.Unlock()
		return a.reply
	}
	a.left = true
	if a.leaving != nil {
		close(a.leaving)
	}
	a.cause = "CALLER_CANCELLED"
	if !gone(ctx) {
		a.cause = "CALLER_TIMEOUT"
	}
	a.mu.Unlock()
	return a.leave(ctx)
}

// leave is the answer to a caller whose own time is over while the attempt goes on (F5).
func (a *action) leave(ctx context.Context) *Reply {
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: a.advice, Code: outcome.CodeRemoteTimeout}
	rec, err := a.p.cfg.Journal.Action(context.WithoutCancel(ctx), a.id)
	if err != nil {
		rec = a.begun(f)
	}
	rec.LocalCause = a.cause
	if gone(ctx) {
		// It may still read: what it did is why its answer ends here.
		f.Code = outcome.CodeCallerCancelled
		reply := a.answer(rec, f, "The caller left; the attempt goes on.")
		reply.Gone = true
		return reply
	}
	return a.answer(rec, f, "The time the caller wanted to wait is over; the attempt goes on.")
}

// begun is the record as it was when the attempt started: what is known when the
// journal cannot be read.
func (a *action) begun(f outcome.Facts) Record {
	rec := a.started
	if rec.Events == 0 {
		rec = Record{ID: a.id, Caller: a.s.Caller.ID, Method: a.s.Method, Target: a.accepted.Target, Relaxed: true, AcceptedAt: a.start}
	}
	rec.Facts = f
	return rec
}

// log writes the one canonical line of an action.
func (a *action) log(rec Record, status int) {
	l := a.p.cfg.Logger
	if !l.Enabled(context.Background(), slog.LevelInfo) {
		return
	}
	f := rec.Shown()
	// Without the place in the code, which is always this one and takes time to find.
	r := slog.NewRecord(time.Now(), slog.LevelInfo, "action", 0)
	r.AddAttrs(slog.String("action", rec.ID.String()), slog.String("caller", rec.Caller), slog.String("session", a.s.Caller.Session), slog.String("route", rec.shownRoute()), slog.String("method", rec.Method),
		slog.String("target", rec.Target), slog.String("phase", f.Phase.String()), slog.String("outcome", f.Outcome.String()), slog.String("retry", f.Retry.String()), slog.String("code", f.Code.String()), slog.Int("status", status), slog.Int("attempts", len(rec.Attempts)),
		slog.Int64("duration_ms", time.Since(a.start).Milliseconds()))
	_ = l.Handler().Handle(context.Background(), r) // as Logger does: there is nobody to tell
}
