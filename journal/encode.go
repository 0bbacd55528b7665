package journal

import (
	"encoding"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"waybill/dispatch"
	"waybill/outcome"
)

// What is stored of the events of an ordinary HTTP request is written here without the
// detour over their JSON, which cost more than a tenth of a request's processor time. The
// bytes are those of pack(json.Marshal(events)), and there is one source for each of them:
// packWords for words, the types' own MarshalText for enumerations. Of what is rarer, or
// what encoding/json would refuse, encoding/json makes the text.
//
// TestEncodeFields fails when a type that is written here gets a field, TestEncodeSame
// and FuzzEncodeSame when a byte differs.

// token is a piece of JSON that is always the same: as it is stored, and its length as text.
type token struct {
	packed string
	text   int
}

func tokenOf(text []byte) token {
	packed, ok := pack(nil, text)
	if !ok {
		panic("journal: not JSON: " + string(text))
	}
	return token{string(packed), len(text)}
}

// fieldToken is a field's name with what stands around it. A comma stands before the first
// one, too: encoder.end makes it the brace.
func fieldToken(name string) token { return tokenOf([]byte(`,"` + name + `":`)) }

// enumTokens are the tokens of an enumeration, by value; others have none.
func enumTokens[T interface {
	~uint8
	encoding.TextMarshaler
}](values []T) []token {
	out := make([]token, int(slices.Max(values))+1)
	for _, v := range values {
		text, err := json.Marshal(v)
		if err != nil {
			panic("journal: enumeration: " + err.Error())
		}
		out[v] = tokenOf(text)
	}
	return out
}

var (
	tokNull  = tokenOf([]byte("null"))
	tokTrue  = tokenOf([]byte("true"))
	tokFalse = tokenOf([]byte("false"))

	eventTypeTokens = enumTokens(dispatch.EventTypes())
	phaseTokens     = enumTokens(outcome.Phases())
	outcomeTokens   = enumTokens(outcome.Outcomes())
	retryTokens     = enumTokens(outcome.Retries())
	codeTokens      = enumTokens(outcome.Codes())
)

// The names of the fields.
var (
	fAccepted      = fieldToken("accepted")
	fAddress       = fieldToken("address")
	fApproval      = fieldToken("approval")
	fApproved      = fieldToken("approved")
	fAt            = fieldToken("at")
	fAttempt       = fieldToken("attempt")
	fAttempts      = fieldToken("attempts")
	fAuthority     = fieldToken("authority")
	fBackground    = fieldToken("background")
	fBlocked       = fieldToken("blocked")
	fBodyBytes     = fieldToken("body_bytes")
	fBound         = fieldToken("bound")
	fBudget        = fieldToken("budget")
	fBytes         = fieldToken("bytes")
	fBytesIn       = fieldToken("bytes_in")
	fBytesOut      = fieldToken("bytes_out")
	fCaller        = fieldToken("caller")
	fCallerName    = fieldToken("caller_name")
	fChainDigest   = fieldToken("chain_digest")
	fChunks        = fieldToken("chunks")
	fCode          = fieldToken("code")
	fComplete      = fieldToken("complete")
	fConditional   = fieldToken("conditional")
	fConnection    = fieldToken("connection")
	fCredential    = fieldToken("credential")
	fDigest        = fieldToken("digest")
	fDispatch      = fieldToken("dispatch")
	fDropped       = fieldToken("dropped")
	fEarlierAction = fieldToken("earlier_action")
	fEnded         = fieldToken("ended")
	fExpectedBytes = fieldToken("expected_bytes")
	fExpiresAt     = fieldToken("expires_at")
	fExpiresMS     = fieldToken("expires_ms")
	fField         = fieldToken("field")
	fFingerprint   = fieldToken("fingerprint")
	fFollowed      = fieldToken("followed")
	fFor           = fieldToken("for")
	fFraming       = fieldToken("framing")
	fGeneration    = fieldToken("generation")
	fHeader        = fieldToken("header")
	fHeaders       = fieldToken("headers")
	fHop           = fieldToken("hop")
	fHopStatus     = fieldToken("hop_status")
	fHostKey       = fieldToken("host_key")
	fID            = fieldToken("id")
	fIn            = fieldToken("in")
	fKey           = fieldToken("key")
	fKind          = fieldToken("kind")
	fLeafDigest    = fieldToken("leaf_digest")
	fLease         = fieldToken("lease")
	fLink          = fieldToken("link")
	fMaker         = fieldToken("maker")
	fMarker        = fieldToken("marker")
	fMethod        = fieldToken("method")
	fMode          = fieldToken("mode")
	fOf            = fieldToken("of")
	fOutcome       = fieldToken("outcome")
	fPeer          = fieldToken("peer")
	fPhase         = fieldToken("phase")
	fProcess       = fieldToken("process")
	fProof         = fieldToken("proof")
	fProtocol      = fieldToken("protocol")
	fProxy         = fieldToken("proxy")
	fProxyStatus   = fieldToken("proxy_status")
	fReason        = fieldToken("reason")
	fRecall        = fieldToken("recall")
	fRedacted      = fieldToken("redacted")
	fRedirectFrom  = fieldToken("redirect_from")
	fRedirectTo    = fieldToken("redirect_to")
	fRelaxed       = fieldToken("relaxed")
	fRepeatable    = fieldToken("repeatable")
	fReplaces      = fieldToken("replaces")
	fRequestID     = fieldToken("request_id")
	fResponse      = fieldToken("response")
	fResult        = fieldToken("result")
	fRetry         = fieldToken("retry")
	fRetryAfter    = fieldToken("retry_after")
	fReused        = fieldToken("reused")
	fReviewed      = fieldToken("reviewed")
	fRoute         = fieldToken("route")
	fRule          = fieldToken("rule")
	fScope         = fieldToken("scope")
	fSent          = fieldToken("sent")
	fServerName    = fieldToken("server_name")
	fSnapshot      = fieldToken("snapshot")
	fSource        = fieldToken("source")
	fSpeaks        = fieldToken("speaks")
	fStage         = fieldToken("stage")
	fStatus        = fieldToken("status")
	fStatusLine    = fieldToken("status_line")
	fTarget        = fieldToken("target")
	fTLSVersion    = fieldToken("tls_version")
	fTrailer       = fieldToken("trailer")
	fTunnel        = fieldToken("tunnel")
	fType          = fieldToken("type")
	fUnresolved    = fieldToken("unresolved")
	fUntil         = fieldToken("until")
	fValues        = fieldToken("values")
	fVersion       = fieldToken("version")
)

// encode makes the request's frame of its events, but for what only its turn decides. Its
// error quotes nothing.
func (r *request) encode() error {
	e := newEncoder()
	defer e.done()
	if e.events(r.events); !e.rare {
		r.frame, r.version, r.text = framed(e.out), packedVersion, e.text
		return nil
	}
	text, err := marshalEvents(r.events)
	if err == nil {
		r.set(text)
	}
	return err
}

// marshalEvents returns the JSON of events. Its error quotes nothing.
func marshalEvents(events []dispatch.Event) ([]byte, error) {
	text, err := json.Marshal(events)
	if err != nil {
		// The text could quote what was to be recorded.
		return nil, fmt.Errorf("%w: event cannot be encoded", dispatch.ErrNotWritten)
	}
	return text, nil
}

// encoder makes one packed text.
type encoder struct {
	out  []byte
	text int // bytes of the JSON that out stands for
	// rare: there is something that is not written here; out is of no use.
	rare bool
	keys []string // of the map that is being written
}

// maxKeptScratch bounds what an encoder keeps for the next one that needs it.
const maxKeptScratch = 16 << 10

var encoders = sync.Pool{New: func() any { return &encoder{out: make([]byte, 0, 1024), keys: make([]string, 0, 32)} }}

func newEncoder() *encoder { return encoders.Get().(*encoder) }

func (e *encoder) done() {
	if cap(e.out) > maxKeptScratch || cap(e.keys) > maxKeptScratch/64 {
		return
	}
	clear(e.keys[:cap(e.keys)]) // a name may hold the memory of a whole header
	e.out, e.text, e.rare = e.out[:0], 0, false
	encoders.Put(e)
}

func (e *encoder) token(t token) {
	e.out = append(e.out, t.packed...)
	e.text += t.text
}

// end ends what began at the place at and whose members have a comma in front each.
func (e *encoder) end(at int, first, last byte) {
	if len(e.out) == at {
		e.out = append(e.out, first)
		e.text++
	} else {
		e.out[at] = first
	}
	e.out = append(e.out, last)
	e.text++
}

// known reports whether an enumeration has the value.
func known[T ~uint8](tokens []token, v T) bool { return int(v) < len(tokens) && tokens[v].text > 0 }

func enum[T ~uint8](e *encoder, tokens []token, v T) {
	if !known(tokens, v) {
		e.rare = true // encoding/json refuses it (CONTRACT A8)
		return
	}
	e.token(tokens[v])
}

func (e *encoder) bool(v bool) {
	if v {
		e.token(tokTrue)
	} else {
		e.token(tokFalse)
	}
}

func (e *encoder) int(v int64) {
	n := len(e.out)
	e.out = strconv.AppendInt(e.out, v, 10)
	e.text += len(e.out) - n
}

func (e *encoder) string(s string) {
	if out, ok := packKnown(e.out, s); ok {
		e.out = out
		e.text += len(s) + 2
		return
	}
	n := len(e.out)
	e.out = appendJSONString(e.out, s)
	e.text += len(e.out) - n
}

// The instants that pack turns into bytes, which it tells by their year.
var firstInstant, endInstant = time.Date(firstPackedYear, 1, 1, 0, 0, 0, 0, time.UTC).Unix(), time.Date(lastPackedYear+1, 1, 1, 0, 0, 0, 0, time.UTC).Unix()

func (e *encoder) instant(t time.Time) {
	s := t.Unix()
	if s < firstInstant || s >= endInstant || t.Location() != time.UTC {
		e.rare = true
		return
	}
	e.out = appendInstant(e.out, t)
	e.text += len(`"2006-01-02T15:04:05Z"`)
	if ns := t.Nanosecond(); ns != 0 {
		e.text += len(".000000000")
		for ; ns%10 == 0; ns /= 10 {
			e.text--
		}
	}
}

// The fields that are left out when they are empty.

func (e *encoder) optBool(t token, v bool) {
	if v {
		e.token(t)
		e.token(tokTrue)
	}
}

func (e *encoder) optInt(t token, v int64) {
	if v != 0 {
		e.token(t)
		e.int(v)
	}
}

func (e *encoder) optString(t token, s string) {
	if s != "" {
		e.token(t)
		e.string(s)
	}
}

// sorted returns the keys of a map in the order of encoding/json. It is valid until the
// next call.
func sorted[V any](e *encoder, m map[string]V) []string {
	keys := e.keys[:0]
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	e.keys = keys
	return keys
}

// key writes a map's key, with a comma in front as a field's name.
func (e *encoder) key(k string) {
	e.out = append(e.out, ',')
	e.string(k)
	e.out = append(e.out, ':')
	e.text += 2
}

func (e *encoder) events(events []dispatch.Event) {
	at := len(e.out)
	for i := range events {
		e.out = append(e.out, ',')
		e.text++
		e.event(&events[i])
	}
	e.end(at, '[', ']')
}

func (e *encoder) event(ev *dispatch.Event) {
	if ev.Boot != nil || ev.Session != nil || ev.Resolution != nil || ev.Job != nil || ev.Items != nil || ev.Approval != nil || ev.Decision != nil {
		e.rare = true
		return
	}
	at := len(e.out)
	e.token(fType)
	enum(e, eventTypeTokens, ev.Type)
	e.optInt(fAttempt, int64(ev.Attempt))
	e.token(fAt)
	e.instant(ev.At)
	if ev.Accepted != nil {
		e.token(fAccepted)
		e.accepted(ev.Accepted)
	}
	if ev.Bound != nil {
		e.token(fBound)
		e.bound(ev.Bound)
	}
	if ev.Credential != nil {
		e.token(fCredential)
		e.credential(ev.Credential)
	}
	if ev.Ended != nil {
		e.token(fEnded)
		e.ended(ev.Ended)
	}
	if ev.Dispatch != nil {
		e.token(fDispatch)
		e.dispatch(ev.Dispatch)
	}
	if ev.Sent != nil {
		e.token(fSent)
		e.sent(ev.Sent)
	}
	if ev.Response != nil {
		e.token(fResponse)
		e.response(ev.Response)
	}
	if ev.Result != nil {
		e.token(fResult)
		e.result(ev.Result)
	}
	if ev.Tunnel != nil {
		e.token(fTunnel)
		e.tunnel(ev.Tunnel)
	}
	if ev.Lease != nil {
		e.token(fLease)
		e.lease(ev.Lease)
	}
	e.end(at, '{', '}')
}

func (e *encoder) accepted(a *dispatch.Accepted) {
	at := len(e.out)
	e.token(fCaller)
	e.string(a.Caller)
	e.optString(fRequestID, a.RequestID)
	e.optString(fMethod, a.Method)
	e.optString(fTarget, a.Target)
	e.optString(fProtocol, a.Protocol)
	e.optBool(fRelaxed, a.Relaxed)
	if l := a.Link; l != nil {
		e.token(fLink)
		at := len(e.out)
		e.token(fKind)
		e.string(string(l.Kind))
		e.token(fOf)
		e.string(l.Of)
		e.end(at, '{', '}')
	}
	e.end(at, '{', '}')
}

func (e *encoder) bound(b *dispatch.Bound) {
	at := len(e.out)
	e.token(fRoute)
	e.string(b.Route)
	e.token(fSnapshot)
	e.string(b.Snapshot)
	e.token(fFingerprint)
	e.string(b.Fingerprint)
	e.optBool(fRepeatable, b.Repeatable)
	e.token(fBodyBytes)
	e.int(b.BodyBytes)
	if b.Key != nil {
		e.token(fKey)
		e.idempotencyKey(b.Key)
	}
	if g := b.Budget; g != nil {
		e.token(fBudget)
		at := len(e.out)
		e.token(fAttempts)
		e.int(int64(g.Attempts))
		e.token(fUntil)
		e.instant(g.Until)
		e.optBool(fBackground, g.Background)
		e.end(at, '{', '}')
	}
	e.optString(fConditional, b.Conditional)
	if b.Recall != nil {
		e.token(fRecall)
		e.recall(b.Recall)
	}
	e.optBool(fApproval, b.Approval)
	e.end(at, '{', '}')
}

func (e *encoder) idempotencyKey(k *dispatch.Key) {
	at := len(e.out)
	e.token(fKey)
	e.string(k.Key)
	e.token(fIn)
	e.string(k.In)
	e.token(fScope)
	e.string(k.Scope)
	e.token(fMaker)
	e.string(k.Maker)
	e.token(fExpiresAt)
	e.instant(k.ExpiresAt)
	e.optString(fSource, k.Source)
	e.optString(fReviewed, k.Reviewed)
	e.optString(fReplaces, k.Replaces)
	e.end(at, '{', '}')
}

func (e *encoder) recall(r *dispatch.Recall) {
	if r.Items != nil {
		e.rare = true
		return
	}
	at := len(e.out)
	if len(r.Values) > 0 {
		e.token(fValues)
		at := len(e.out)
		for _, k := range sorted(e, r.Values) {
			e.key(k)
			e.string(r.Values[k])
		}
		e.end(at, '{', '}')
	}
	e.optString(fCallerName, r.CallerName)
	e.optString(fMarker, r.Marker)
	e.optString(fRule, r.Rule)
	e.end(at, '{', '}')
}

func (e *encoder) credential(c *dispatch.Credential) {
	at := len(e.out)
	e.token(fID)
	e.string(c.ID)
	e.optString(fVersion, c.Version)
	e.token(fMode)
	e.string(c.Mode)
	e.end(at, '{', '}')
}

func (e *encoder) ended(d *dispatch.Ended) {
	at := len(e.out)
	if d.Facts != (outcome.Facts{}) { // as Ended.MarshalJSON has it
		e.token(fPhase)
		enum(e, phaseTokens, d.Phase)
		e.token(fOutcome)
		enum(e, outcomeTokens, d.Outcome)
		e.token(fRetry)
		enum(e, retryTokens, d.Retry)
		if d.Code != outcome.CodeNone {
			e.token(fCode)
			enum(e, codeTokens, d.Code)
		}
	}
	e.optString(fStage, string(d.Stage))
	e.optString(fReason, d.Reason)
	e.optString(fField, d.Field)
	e.optBool(fFollowed, d.Followed)
	e.optString(fRoute, d.Route)
	e.optString(fCredential, d.Credential)
	e.optString(fEarlierAction, d.EarlierAction)
	if d.Peer != nil {
		e.token(fPeer)
		e.peer(d.Peer)
	}
	e.optString(fSource, string(d.Source))
	e.optString(fProof, d.Proof)
	e.optString(fStatusLine, d.StatusLine)
	e.optString(fHop, d.Hop)
	e.optInt(fHopStatus, int64(d.HopStatus))
	e.optString(fProxyStatus, d.ProxyStatus)
	e.optInt(fRetryAfter, int64(d.RetryAfter))
	e.optBool(fSpeaks, d.Speaks)
	e.end(at, '{', '}')
}

func (e *encoder) peer(p *outcome.Peer) {
	at := len(e.out)
	e.optString(fAddress, p.Address)
	e.optString(fServerName, p.ServerName)
	e.optString(fProtocol, p.Protocol)
	e.optString(fTLSVersion, p.TLSVersion)
	e.optString(fLeafDigest, p.LeafDigest)
	e.optString(fChainDigest, p.ChainDigest)
	e.optString(fHostKey, p.HostKey)
	e.optString(fProxy, p.Proxy)
	e.end(at, '{', '}')
}

func (e *encoder) dispatch(d *dispatch.Dispatch) {
	at := len(e.out)
	e.token(fConnection)
	e.string(d.Connection)
	e.optBool(fReused, d.Reused)
	e.optString(fStage, string(d.Stage))
	if d.Peer != nil {
		e.token(fPeer)
		e.peer(d.Peer)
	}
	e.token(fUnresolved)
	enum(e, retryTokens, d.Unresolved)
	e.optInt(fGeneration, int64(d.Generation))
	if !d.Until.IsZero() {
		e.token(fUntil)
		e.instant(d.Until)
	}
	if d.Credential != nil {
		e.token(fCredential)
		e.credential(d.Credential)
	}
	e.optString(fApproved, d.Approved)
	e.end(at, '{', '}')
}

func (e *encoder) sent(s *dispatch.Sent) {
	at := len(e.out)
	e.token(fHeaders)
	e.bool(s.Headers)
	e.token(fComplete)
	e.bool(s.Complete)
	e.end(at, '{', '}')
}

func (e *encoder) response(r *dispatch.Response) {
	if r.Exec != nil {
		e.rare = true
		return
	}
	at := len(e.out)
	e.token(fStatus)
	e.int(int64(r.Status))
	e.optInt(fBytes, r.Bytes)
	if r.ExpectedBytes != nil {
		e.token(fExpectedBytes)
		e.int(*r.ExpectedBytes)
	}
	e.optString(fFraming, r.Framing)
	e.optString(fDigest, r.Digest)
	e.optInt(fRedacted, int64(r.Redacted))
	e.optString(fHop, r.Hop)
	e.optString(fProxyStatus, r.ProxyStatus)
	e.end(at, '{', '}')
}

func (e *encoder) result(r *dispatch.Result) {
	if r.Exec != nil {
		e.rare = true
		return
	}
	at := len(e.out)
	e.token(fStatus)
	e.int(int64(r.Status))
	e.fields(fHeader, r.Header)
	e.fields(fTrailer, r.Trailer)
	e.token(fBytes)
	e.int(r.Bytes)
	e.token(fChunks)
	e.int(int64(r.Chunks))
	e.token(fDigest)
	e.string(r.Digest)
	e.optString(fRedirectTo, r.RedirectTo)
	e.optString(fRedirectFrom, r.RedirectFrom)
	if !r.ExpiresAt.IsZero() {
		e.token(fExpiresAt)
		e.instant(r.ExpiresAt)
	}
	e.end(at, '{', '}')
}

// fields writes header or trailer fields. Those that are not UTF-8 stand in another place
// (Result.MarshalJSON), and are rare.
func (e *encoder) fields(t token, m map[string][]string) {
	if len(m) == 0 {
		return
	}
	e.token(t)
	at := len(e.out)
	for _, k := range sorted(e, m) {
		e.key(k)
		values := m[k]
		if values == nil {
			e.token(tokNull)
			continue
		}
		at := len(e.out)
		for _, v := range values {
			if !utf8.ValidString(v) {
				e.rare = true
				return
			}
			e.out = append(e.out, ',')
			e.text++
			e.string(v)
		}
		e.end(at, '[', ']')
	}
	e.end(at, '{', '}')
}

func (e *encoder) tunnel(t *dispatch.TunnelInfo) {
	at := len(e.out)
	e.optString(fAuthority, t.Authority)
	e.optInt(fBytesOut, t.BytesOut)
	e.optInt(fBytesIn, t.BytesIn)
	e.optInt(fRedacted, int64(t.Redacted))
	e.optBool(fBlocked, t.Blocked)
	e.end(at, '{', '}')
}

func (e *encoder) lease(l *dispatch.Lease) {
	at := len(e.out)
	e.token(fGeneration)
	e.int(int64(l.Generation))
	e.optString(fProcess, l.Process)
	e.optString(fFor, l.For)
	e.token(fUntil)
	e.instant(l.Until)
	e.end(at, '{', '}')
}

func (e *encoder) manifest(m *manifest) {
	at := len(e.out)
	e.token(fBytes)
	e.int(m.Bytes)
	e.token(fChunks)
	e.int(int64(m.Chunks))
	e.token(fDigest)
	e.string(m.Digest)
	e.optInt(fExpiresMS, m.Expires)
	e.optBool(fDropped, m.Dropped)
	e.end(at, '{', '}')
}

// plainJSON are the bytes that stand for themselves in a string of encoding/json, which
// escapes what HTML gives a meaning to.
var plainJSON = func() (t [256]bool) {
	for c := ' '; c < utf8.RuneSelf; c++ {
		t[c] = c != '"' && c != '\\' && c != '<' && c != '>' && c != '&'
	}
	return t
}()

const hexDigits = "0123456789abcdef"

// appendJSONString appends s as encoding/json writes it.
func appendJSONString(out []byte, s string) []byte {
	out = append(out, '"')
	done := 0
	for i := 0; i < len(s); {
		c := s[i]
		if plainJSON[c] {
			i++
			continue
		}
		size := 1
		if c >= utf8.RuneSelf {
			var r rune
			r, size = utf8.DecodeRuneInString(s[i:])
			// Not UTF-8, or an end of line in JavaScript.
			if invalid := r == utf8.RuneError && size == 1; !invalid && r != '\u2028' && r != '\u2029' {
				i += size
				continue
			} else if out = append(out, s[done:i]...); invalid {
				out = append(out, `\ufffd`...)
			} else {
				out = append(out, '\\', 'u', '2', '0', '2', hexDigits[r&0xf])
			}
		} else {
			out = append(out, s[done:i]...)
			switch c {
			case '"', '\\':
				out = append(out, '\\', c)
			case '\b':
				out = append(out, '\\', 'b')
			case '\f':
				out = append(out, '\\', 'f')
			case '\n':
				out = append(out, '\\', 'n')
			case '\r':
				out = append(out, '\\', 'r')
			case '\t':
				out = append(out, '\\', 't')
			default:
				out = append(out, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&0xf])
			}
		}
		i += size
		done = i
	}
	return append(append(out, s[done:]...), '"')
}
