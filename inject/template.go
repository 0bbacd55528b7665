package inject

import (
	"encoding/base64"
	"strings"

	"waybill/outcome"
)

// maxTemplate bounds a template, in bytes.
const maxTemplate = 4 << 10

// Template renders a secret into a field value. It is immutable and safe for
// concurrent use; make it with ParseTemplate.
//
//	Bearer ${secret}     the secret
//	Basic ${basic:user}  base64 of user:secret (RFC 7617); the user may be empty
//
// Everything else is literal text: printable ASCII, no space at either end. "${"
// begins a placeholder always and cannot be written literally; a "$" before
// anything else is itself. At least one placeholder is needed.
type Template struct {
	parts []part
	mode  string
}

type partKind uint8

const (
	partInvalid partKind = iota
	partLiteral
	partSecret
	partBasic
)

type part struct {
	kind partKind
	text string // the literal, or the user of partBasic
}

// The injection modes: what is recorded of how a secret was attached (CONTRACT C2).
const (
	ModeBearer = "header:bearer"
	ModeBasic  = "header:basic"
	ModeHeader = "header"
)

// ParseTemplate reads a template. The error is an *Error with
// INJECTION_UNSUPPORTED (CONTRACT C1) and the position of what is wrong; it does
// not quote the template, in which somebody may have written a secret.
func ParseTemplate(s string) (*Template, error) {
	refuse := func(reason string, offset int) (*Template, error) {
		return nil, &Error{Code: outcome.CodeInjectionUnsupported, Reason: reason, Position: offset + 1}
	}
	if len(s) > maxTemplate {
		return refuse(ReasonTooLarge, maxTemplate)
	}
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return refuse(ReasonTemplate, i)
		}
	}
	t := &Template{}
	secrets := 0
	for offset := 0; offset < len(s); {
		start := strings.Index(s[offset:], "${")
		if start < 0 {
			t.parts = append(t.parts, part{partLiteral, s[offset:]})
			break
		}
		if start > 0 {
			t.parts = append(t.parts, part{partLiteral, s[offset : offset+start]})
		}
		offset += start
		length := strings.IndexByte(s[offset:], '}')
		if length < 0 {
			return refuse(ReasonTemplate, offset)
		}
		name := s[offset+2 : offset+length]
		user, basic := strings.CutPrefix(name, "basic:")
		switch {
		case name == "secret":
			t.parts = append(t.parts, part{kind: partSecret})
		// The first colon ends the user (RFC 7617 §2): there is none in it.
		case basic && !strings.ContainsAny(user, ":${"):
			t.parts = append(t.parts, part{partBasic, user})
		default:
			return refuse(ReasonPlaceholder, offset)
		}
		secrets++
		offset += length + 1
	}
	switch {
	case secrets == 0:
		return nil, &Error{Code: outcome.CodeInjectionUnsupported, Reason: ReasonNoPlaceholder}
	case s[0] == ' ':
		return refuse(ReasonOuterSpace, 0)
	case s[len(s)-1] == ' ':
		return refuse(ReasonOuterSpace, len(s)-1)
	}
	t.mode = ModeHeader
	if first := t.parts[0]; first.kind == partLiteral {
		switch scheme, _, spaced := strings.Cut(first.text, " "); {
		case spaced && strings.EqualFold(scheme, "Bearer"):
			t.mode = ModeBearer
		case spaced && strings.EqualFold(scheme, "Basic"):
			t.mode = ModeBasic
		}
	}
	return t, nil
}

// Mode is the injection mode: ModeBearer, ModeBasic or ModeHeader.
func (t *Template) Mode() string { return t.mode }

// Render returns the field value. It is itself a secret: it goes into the request
// and into the search for reflections. The error is an *Error: for a template that
// was not parsed, or a secret that cannot stand in a field value.
func (t *Template) Render(s Secret) (string, error) {
	if t == nil || len(t.parts) == 0 {
		return "", &Error{Code: outcome.CodeInjectionUnsupported, Reason: ReasonTemplate}
	}
	secret := s.bytes()
	if err := checkBytes(secret); err != nil {
		return "", err
	}
	var b strings.Builder
	n := 0
	for _, p := range t.parts {
		n += len(p.text) + len(secret)
	}
	b.Grow(n)
	for _, p := range t.parts {
		switch p.kind {
		case partLiteral:
			b.WriteString(p.text)
		case partSecret:
			b.Write(secret)
		case partBasic:
			pair := append([]byte(p.text+":"), secret...)
			b.WriteString(base64.StdEncoding.EncodeToString(pair))
			clear(pair)
		case partInvalid:
			return "", &Error{Code: outcome.CodeInjectionUnsupported, Reason: ReasonTemplate}
		}
	}
	return b.String(), nil
}

// kept are the fields that no credential is put into: they frame the message, steer
// the connection or the way to the origin, or are meant for a proxy (RFC 9110
// §7.6.1, RFC 9112 §6). Names in lower case.
var kept = map[string]bool{
	"host": true, "content-length": true, "transfer-encoding": true, "trailer": true, "te": true,
	"connection": true, "keep-alive": true, "upgrade": true, "http2-settings": true,
	"expect": true, "max-forwards": true, "via": true, "forwarded": true,
	"content-type": true, "content-encoding": true, "content-range": true, "range": true, "date": true,
}

// CheckHeader says whether a secret may be put into the field name: a token (RFC
// 9110 §5.6.2) that is neither a field of the connection or the framing, nor one of
// proxies (Proxy-*), nor one of Waybill's own (Waybill-*). The error is an *Error
// with INJECTION_UNSUPPORTED.
func CheckHeader(name string) error {
	if name == "" {
		return &Error{Code: outcome.CodeInjectionUnsupported, Reason: ReasonHeader}
	}
	for i := range len(name) {
		if !isTokenByte(name[i]) {
			return &Error{Code: outcome.CodeInjectionUnsupported, Reason: ReasonHeader, Position: i + 1}
		}
	}
	lower := strings.ToLower(name)
	if kept[lower] || strings.HasPrefix(lower, "proxy-") || strings.HasPrefix(lower, "waybill-") {
		return &Error{Code: outcome.CodeInjectionUnsupported, Reason: ReasonHeaderKept}
	}
	return nil
}

func isTokenByte(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}
