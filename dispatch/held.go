package dispatch

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"waybill/dispatch/leak"
	"waybill/outcome"
	"waybill/routes"
)

// A held request is what will be sent, before anything is attached to it: length(4) ‖
// JSON of heldHead ‖ body, in chunks. The journal seals it.
type heldHead struct {
	Version   int                 `json:"version"`
	Caller    Caller              `json:"caller"`
	Protocol  string              `json:"protocol"`
	Method    string              `json:"method"`
	Addressed routes.Target       `json:"addressed"`
	Target    routes.Target       `json:"target"`
	Authority string              `json:"authority"`
	RawPath   string              `json:"raw_path"`
	RawQuery  string              `json:"raw_query"`
	HasQuery  bool                `json:"has_query"`
	Header    map[string][][]byte `json:"header"` // obs-text is kept as it came
	HasBody   bool                `json:"has_body"`
	Spooled   bool                `json:"spooled"` // a body was read, be it empty
	Length    int64               `json:"length"`
	Exec      *heldExec           `json:"exec,omitempty"` // of a command
	// Supersedes is the action that the caller named (CONTRACT O3): the guard asks once more
	// before the request is sent. A build that does not know it refuses what would need it.
	Supersedes string          `json:"supersedes,omitempty"`
	Shown      ApprovalRequest `json:"shown"`
}

type heldExec struct {
	User    string   `json:"user"`
	Command string   `json:"command"`
	Env     []EnvVar `json:"env,omitempty"`
}

const heldVersion = 1

// maxHeldHead bounds the JSON of a heldHead.
const maxHeldHead = 4 << 20

var errHeld = errors.New("dispatch: the held request is not what was put down")

// ApprovalRequest is what will be sent, for the person who decides: everything but
// secrets, which are masked (CONTRACT D5, C2).
type ApprovalRequest struct {
	Line   string       `json:"request_line"` // method and URL, query included
	Fields []ShownField `json:"fields"`
	Body   *ShownBody   `json:"body,omitempty"`
}

// ShownField is one field that will be sent.
type ShownField struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	// Injected: the value is a template, Waybill puts the secret in.
	Injected bool `json:"injected,omitempty"`
	Masked   bool `json:"masked,omitempty"`
}

// ShownBody is the body that will be sent, or its beginning.
type ShownBody struct {
	Bytes  int64  `json:"bytes"`
	Digest string `json:"digest"`
	Text   string `json:"text,omitempty"` // "" for what is no text
	Cut    bool   `json:"cut,omitempty"`  // Text is the beginning only
	Binary bool   `json:"binary,omitempty"`
}

// maxShownBody is how much of a body is shown, in bytes.
const maxShownBody = 64 << 10

func hexOf(b []byte) string { return hex.EncodeToString(b) }

// sensitive reports whether a value under this name is likely to be a secret of the
// caller's own. Such a value is sent, and covered by the fingerprint, and not shown.
func sensitive(name string) bool {
	name = strings.ToLower(name)
	for _, part := range []string{"authorization", "cookie", "token", "secret", "password", "passwd", "api-key", "apikey", "api_key", "signature", "credential", "session"} {
		if strings.Contains(name, part) {
			return true
		}
	}
	return name == "key" || name == "sig" || name == "x-auth"
}

const maskedValue = "[masked]"

// shownRequest describes what will be sent. The guard knows the secrets that will be
// attached: a caller that has one all the same does not get it shown.
func (a *action) shownRequest(used *Credential, guard *leak.Guard) ApprovalRequest {
	out := a.out
	if out.Exec != nil {
		return a.shownExec(used, guard)
	}
	var b strings.Builder
	b.WriteString(out.Method + " " + out.Target.Scheme + "://" + out.Authority + out.RawPath)
	if out.HasQuery {
		b.WriteByte('?')
		for i, pair := range strings.Split(out.RawQuery, "&") {
			if i > 0 {
				b.WriteByte('&')
			}
			if name, _, has := strings.Cut(pair, "="); has && sensitive(name) {
				pair = name + "=" + maskedValue
			}
			b.WriteString(pair)
		}
	}
	line, _ := guard.MaskString(b.String())
	shown := ApprovalRequest{Line: line}
	names := make([]string, 0, len(out.Header))
	for name := range out.Header {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		for _, v := range out.Header[name] {
			if v == "" && name == "User-Agent" {
				continue // none is sent
			}
			f := ShownField{Name: name}
			if sensitive(name) {
				f.Value, f.Masked = maskedValue, true
			} else {
				var n int
				f.Value, n = guard.MaskString(strings.ToValidUTF8(v, "\uFFFD"))
				f.Masked = n > 0
			}
			shown.Fields = append(shown.Fields, f)
		}
	}
	for i := range a.route.Inject {
		in := &a.route.Inject[i]
		shown.Fields = append(shown.Fields, ShownField{Name: in.Place(), Value: strings.TrimSpace(in.Value + " (credential " + in.Credential + ")"), Injected: true})
	}
	if used != nil && len(shown.Fields) > 0 {
		last := &shown.Fields[len(shown.Fields)-1]
		last.Value += ", version " + used.Version
	}
	if a.body != nil {
		shown.Body = shownBody(a.body, guard)
	}
	return shown
}

// shownExec describes a command.
func (a *action) shownExec(used *Credential, guard *leak.Guard) ApprovalRequest {
	command, n := guard.MaskString(strings.ToValidUTF8(a.out.Exec.Command, "\uFFFD"))
	shown := ApprovalRequest{Line: "EXEC ssh://" + a.out.Exec.User + "@" + a.out.Authority, Fields: []ShownField{{Name: "command", Value: command, Masked: n > 0}}}
	for _, v := range a.execEnv {
		f := ShownField{Name: "env " + v.Name, Value: v.Value}
		if sensitive(v.Name) {
			f.Value, f.Masked = maskedValue, true
		} else if f.Value, n = guard.MaskString(strings.ToValidUTF8(v.Value, "\uFFFD")); n > 0 {
			f.Masked = true
		}
		shown.Fields = append(shown.Fields, f)
	}
	if used != nil {
		shown.Fields = append(shown.Fields, ShownField{Name: "key", Value: used.ID + ", version " + used.Version, Injected: true})
	}
	if a.body != nil {
		shown.Body = shownBody(a.body, guard)
	}
	return shown
}

func shownBody(body *spool, guard *leak.Guard) *ShownBody {
	s := &ShownBody{Bytes: body.length, Digest: "sha256:" + hexOf(body.digest[:])}
	// A little more than is shown: a secret at the cut is masked whole.
	text, err := io.ReadAll(io.LimitReader(body.reader(), maxShownBody+inspectBehind))
	if err != nil {
		return s
	}
	guard.MaskBytes(text)
	if len(text) > maxShownBody {
		text, s.Cut = text[:maxShownBody], true
		for len(text) > 0 && !utf8.RuneStart(text[len(text)-1]) {
			text = text[:len(text)-1]
		}
		if len(text) > 0 && text[len(text)-1] >= utf8.RuneSelf {
			text = text[:len(text)-1]
		}
	}
	if !utf8.Valid(text) || bytes.IndexByte(text, 0) >= 0 {
		s.Binary, s.Cut = true, false
		return s
	}
	s.Text = string(text)
	return s
}

// inspectBehind is how far behind the shown part secrets are looked for.
const inspectBehind = 64 << 10

// heldReader cuts a held request into chunks.
type heldReader struct {
	r     io.Reader
	index int
	ahead []byte
}

// holdRequest returns the request as it is put down.
func (a *action) holdRequest(used *Credential, guard *leak.Guard) (*heldReader, error) {
	out := a.out
	head := heldHead{
		Version: heldVersion, Caller: a.s.Caller, Protocol: a.s.Protocol, Method: out.Method, Addressed: a.addressed, Target: out.Target, Authority: out.Authority,
		RawPath: out.RawPath, RawQuery: out.RawQuery, HasQuery: out.HasQuery, Header: make(map[string][][]byte, len(out.Header)),
		HasBody: out.Body != nil, Spooled: a.body != nil, Length: out.Length, Supersedes: a.s.Supersedes, Shown: a.shownRequest(used, guard),
	}
	if out.Exec != nil {
		head.Exec = &heldExec{User: out.Exec.User, Command: out.Exec.Command, Env: a.execEnv}
	}
	for name, values := range out.Header {
		head.Header[name] = [][]byte{}
		for _, v := range values {
			head.Header[name] = append(head.Header[name], []byte(v))
		}
	}
	text, err := json.Marshal(&head)
	if err != nil || len(text) > maxHeldHead {
		return nil, fmt.Errorf("%w: the request cannot be held", ErrNotWritten)
	}
	parts := []io.Reader{bytes.NewReader(binary.BigEndian.AppendUint32(nil, uint32(len(text)))), bytes.NewReader(text)} //nolint:gosec // bounded above
	if a.body != nil {
		parts = append(parts, a.body.reader())
	}
	h := &heldReader{r: io.MultiReader(parts...)}
	h.ahead, err = h.read()
	return h, err
}

func (h *heldReader) read() ([]byte, error) {
	buf := make([]byte, MaxChunkBytes)
	n, err := io.ReadFull(h.r, buf)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fmt.Errorf("%w: %w", ErrNotWritten, err)
	}
	return buf[:n], nil
}

// next returns the next chunk and whether it is the last.
func (h *heldReader) next() (Chunk, bool, error) {
	data := h.ahead
	var err error
	if h.ahead, err = h.read(); err != nil {
		return Chunk{}, false, err
	}
	c := Chunk{Attempt: HeldRequest, Index: h.index, Data: data, Last: len(h.ahead) == 0}
	h.index++
	return c, c.Last, nil
}

// chunkReader reads a held request from the journal.
type chunkReader struct {
	ctx   context.Context //nolint:containedctx // of one read
	p     *Pipeline
	rec   *Record
	index int
	rest  []byte
}

func (r *chunkReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if r.index >= r.rec.Approval.Held.Chunks {
			return 0, io.EOF
		}
		data, err := r.p.cfg.Journal.Chunk(r.ctx, r.rec.ID, HeldRequest, r.index)
		if err != nil {
			return 0, err
		}
		r.rest = data
		r.index++
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// openHeld returns the head of a held request, and the body behind it.
func (p *Pipeline) openHeld(ctx context.Context, rec *Record) (*heldHead, io.Reader, error) {
	r := &chunkReader{ctx: ctx, p: p, rec: rec}
	var n [4]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return nil, nil, err
	}
	size := binary.BigEndian.Uint32(n[:])
	if size > maxHeldHead {
		return nil, nil, errHeld
	}
	text := make([]byte, size)
	if _, err := io.ReadFull(r, text); err != nil {
		return nil, nil, err
	}
	head := new(heldHead)
	if json.Unmarshal(text, head) != nil || head.Version != heldVersion {
		return nil, nil, errHeld // the library's text could quote the request
	}
	return head, r, nil
}

// rebuildError says that the request cannot be sent as it was approved any more.
type rebuildError struct{ reason string }

func (e *rebuildError) Error() string { return "dispatch: " + e.reason }

// rebuild makes the action of a held request. What it makes is compared with the
// approved fingerprint before anything is attached (stillApproved).
func (a *action) rebuild(rec *Record) error {
	a.accepted = Accepted{Caller: rec.Caller, Method: rec.Method, Target: rec.Target, Protocol: rec.Protocol}
	a.s = &Submission{Caller: Caller{ID: rec.Caller}, Method: rec.Method, Protocol: rec.Protocol}
	a.print, a.recall, a.key = rec.Bound.Fingerprint, rec.Bound.Recall, rec.Bound.Key
	a.binding = a.p.binding.Load()
	route := a.binding.Snapshot.Route(rec.Bound.Route)
	if route == nil || a.binding.Snapshot.Digest() != rec.Bound.Snapshot {
		return &rebuildError{"configuration_changed"}
	}
	a.route = route
	head, body, err := a.p.openHeld(context.Background(), rec)
	if err != nil {
		return err
	}
	if head.Caller.ID != rec.Caller || head.Method != rec.Method || !route.AllowsCaller(head.Caller.Name) {
		return errHeld
	}
	a.s.Caller, a.s.Supersedes = head.Caller, head.Supersedes
	if head.Exec != nil {
		return a.rebuildExec(head, body)
	}
	a.addressed = head.Addressed
	out := &Outgoing{Method: head.Method, Target: head.Target, Authority: head.Authority, RawPath: head.RawPath, RawQuery: head.RawQuery, HasQuery: head.HasQuery,
		Header: make(http.Header, len(head.Header)), Length: head.Length,
		Idle: route.Limits.Idle, MaxBody: route.Limits.Response, CloseDelimited: route.Contract.CloseDelimited}
	for name, values := range head.Header {
		out.Header[name] = []string{}
		for _, v := range values {
			out.Header[name] = append(out.Header[name], string(v))
		}
	}
	if head.Spooled {
		if err := a.unhold(head, body); err != nil {
			return err
		}
		if head.HasBody {
			out.Body = bodyOf(a.body)
		}
	}
	a.out = out
	a.repeatable = route.Repeatable(head.Method)
	a.conditions()
	a.advice = outcome.ByContract(a.repeatable, a.key != nil)
	return nil
}

// unhold takes the body of a held request into a spool.
func (a *action) unhold(head *heldHead, body io.Reader) (err error) {
	if a.body, err = spoolBody(body, head.Length, a.route.Limits.Buffer, head.Length, a.p.cfg.SpoolDir); err != nil {
		return err
	}
	if a.body.length != head.Length {
		return errHeld
	}
	return nil
}

// rebuildExec is rebuild for a command: it goes through the same checks as at first.
func (a *action) rebuildExec(head *heldHead, body io.Reader) error {
	a.s.Authorities.Connect = head.Target.Authority()
	a.s.Exec = &ExecRequest{User: head.Exec.User, Command: head.Exec.Command, Env: head.Exec.Env, Strict: true}
	name := a.route.Name
	for _, step := range []func(context.Context) *Refusal{a.aimExec, a.chooseExec} {
		if step(context.Background()) != nil {
			return &rebuildError{"configuration_changed"}
		}
	}
	if a.route.Name != name {
		return &rebuildError{"configuration_changed"}
	}
	if head.Spooled {
		if err := a.unhold(head, body); err != nil {
			return err
		}
		a.out.Body, a.out.Length = bodyOf(a.body), a.body.length
	}
	return nil
}
