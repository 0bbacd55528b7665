package dispatch

import (
	"maps"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// hopByHop are the fields that belong to one connection (RFC 9110 §7.6.1) and the
// proxy's own conversation with its caller (§11.7).
var hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
	"Proxy-Authorization", "Proxy-Authenticate", "Proxy-Authentication-Info"}

// removeHopByHop deletes them and every field that Connection nominates.
func removeHopByHop(h http.Header) {
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = textproto.TrimString(name); name != "" {
				h.Del(name)
			}
		}
	}
	for _, name := range hopByHop {
		delete(h, name)
	}
}

// removeOwn deletes every field that speaks for Waybill (CONTRACT V6).
func removeOwn(h http.Header) {
	if control.Off("V6-forged-fields-dropped") {
		return
	}
	for name := range h {
		if outcome.IsMemberField(name) {
			delete(h, name)
		}
	}
}

// canonical returns a copy of h in which every field stands once under the canonical
// form of its name: the rules here look fields up by it, and a second spelling would
// pass them by. It reports false when a name is no token or a value could not be sent.
func canonical(h http.Header) (http.Header, bool) {
	if out := copied(h); out != nil {
		return out, true
	}
	out, valid := make(http.Header, len(h)), true
	for _, name := range sortedNames(h) {
		// Whitespace before the colon is removed (RFC 9112 §5.1); net/http keeps it in the
		// names of an answer's fields.
		key := strings.TrimRight(name, " \t")
		if !httpguts.ValidHeaderFieldName(key) {
			valid = false
			continue
		}
		key = http.CanonicalHeaderKey(key)
		for _, v := range h[name] {
			if !httpguts.ValidHeaderFieldValue(v) {
				valid = false
				continue
			}
			out[key] = append(out[key], v)
		}
	}
	return out, valid
}

// copied returns a copy of h where nothing in it is to be changed; nil: something is. No
// two of its fields share an array beyond their own values.
func copied(h http.Header) http.Header {
	n := 0
	for name, values := range h {
		if !isCanonical(name) || len(values) == 0 {
			return nil
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return nil
			}
		}
		n += len(values)
	}
	out, all := make(http.Header, len(h)+4), make([]string, 0, n)
	for name, values := range h {
		i := len(all)
		all = append(all, values...)
		out[name] = all[i:len(all):len(all)]
	}
	return out
}

// isCanonical reports whether a name is a token in the form that http.CanonicalHeaderKey
// gives it.
func isCanonical(name string) bool {
	upper := true
	for i := range len(name) {
		c := name[i]
		if upper && 'a' <= c && c <= 'z' || !upper && 'A' <= c && c <= 'Z' || !httpguts.IsTokenRune(rune(c)) {
			return false
		}
		upper = c == '-'
	}
	return name != ""
}

// shared returns h with room for more fields, its values being those of h: neither changes
// them in place.
func shared(h http.Header, more int) http.Header {
	out := make(http.Header, len(h)+more)
	maps.Copy(out, h)
	return out
}

func sortedNames(h http.Header) []string {
	names := make([]string, 0, len(h))
	for name := range h {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// managed returns the canonical names that the route sets itself, which a caller
// may not supply: what is injected, and on a route that injects anything the other
// ways of presenting a credential too.
func managed(r *routes.Route) []string {
	if len(r.Inject) == 0 {
		return nil
	}
	names := make([]string, 0, len(r.Inject)+2)
	for i := range r.Inject {
		names = append(names, r.Inject[i].Fields()...)
	}
	if !r.PassAuthorization {
		names = append(names, "Authorization", "Cookie")
	}
	return names
}

// outgoingHeader builds the fields that are forwarded, without the injected ones
// (DESIGN 1.3). The submission's header is not changed.
func outgoingHeader(s *Submission, r *routes.Route, pseudonym string) (http.Header, *Refusal) {
	h, valid := canonical(s.Header)
	if !valid {
		return nil, refusal(outcome.CodeInvalidRequest, "request.headers", "bad_field", "A header field has a name or a value that cannot be sent.")
	}
	if r.RejectManaged {
		// Before Connection takes anything away: naming a managed field there is no way
		// around the refusal (B1).
		for _, name := range managed(r) {
			if _, sent := h[name]; sent {
				return nil, refusal(outcome.CodeHeaderForbidden, "request.headers."+strings.ToLower(name), "managed_field",
					"This route sets the field itself; send the request without it.")
			}
		}
	}
	protocol, refused := wantedUpgrade(h, s, r)
	if refused != nil {
		return nil, refused
	}
	if looped(h, pseudonym) {
		return nil, refusal(outcome.CodeLoopDetected, "request.headers.via", "own_pseudonym", "The request has passed this proxy already.")
	}
	if s.Method == http.MethodOptions {
		if refusal := maxForwards(h); refusal != nil {
			return nil, refusal
		}
	}
	removeHopByHop(h)
	removeOwn(h)
	for _, name := range managed(r) {
		delete(h, name)
	}
	for _, name := range r.Strip {
		h.Del(name)
	}
	if !r.PassTrace {
		delete(h, "Traceparent")
		delete(h, "Tracestate")
		delete(h, "Baggage")
	}
	// The body was spooled: Waybill answered a 100-continue itself. A caller that asked
	// wants no upload for nothing, so the origin is asked, too (RFC 9110 §10.1.1): one
	// that refuses from the head gets none of the body. In HTTP/1.0 it means nothing.
	expects := s.Protocol != "HTTP/1.0" && strings.EqualFold(strings.Join(h["Expect"], ","), "100-continue")
	if delete(h, "Expect"); expects {
		h.Set("Expect", "100-continue")
	}
	// The request is framed anew.
	delete(h, "Content-Length")
	delete(h, "Host")
	if _, sent := h["User-Agent"]; !sent {
		h["User-Agent"] = []string{""} // net/http adds its own otherwise
	}
	h.Add("Via", viaVersion(s.Protocol)+" "+pseudonym)
	if protocol != "" {
		h["Connection"], h["Upgrade"] = []string{"Upgrade"}, []string{protocol}
		// Compressed messages could not be searched for the secret (C5).
		delete(h, "Sec-Websocket-Extensions")
	}
	return h, nil
}

func refusal(code outcome.Code, field, reason, detail string) *Refusal {
	f, _ := outcome.Of(code)
	return &Refusal{Facts: f, Field: field, Reason: reason, Detail: detail}
}

// looped looks for the own pseudonym in Via (RFC 9110 §7.6.3).
func looped(h http.Header, pseudonym string) bool {
	for _, line := range h["Via"] {
		for hop := range strings.SplitSeq(line, ",") {
			f := strings.Fields(hop)
			if len(f) >= 2 && f[1] == pseudonym {
				return true
			}
		}
	}
	return false
}

// maxForwards obeys RFC 9110 §7.6.2 for OPTIONS: at zero the proxy is the final
// recipient, and has nothing to say for the origin.
func maxForwards(h http.Header) *Refusal {
	v := h.Get("Max-Forwards")
	if v == "" {
		return nil
	}
	n, err := strconv.ParseUint(v, 10, 31)
	if err != nil {
		return refusal(outcome.CodeInvalidRequest, "request.headers.max-forwards", "not_a_number", "Max-Forwards is not a number.")
	}
	if n == 0 {
		return refusal(outcome.CodeUnsupportedAction, "request.headers.max-forwards", "max_forwards", "Max-Forwards is 0: the request may not be forwarded.")
	}
	h.Set("Max-Forwards", strconv.FormatUint(n-1, 10))
	return nil
}

func viaVersion(protocol string) string {
	if v, ok := strings.CutPrefix(protocol, "HTTP/"); ok {
		return strings.TrimSuffix(v, ".0") // "2.0" is written "2" (RFC 9110 §7.6.3)
	}
	return "1.1"
}

// relayedHeader keeps the end-to-end fields of an origin's answer (CONTRACT G12).
func relayedHeader(h http.Header) http.Header {
	out, _ := canonical(h) // what is no field is left out
	removeHopByHop(out)
	removeOwn(out)
	return out
}

// notInTrailers never count when they come as trailers: they decide framing, routing,
// authentication or meaning (RFC 9110 §6.5.1) – and a Proxy-Status that comes after
// Waybill's own member could speak in its name (V6).
var notInTrailers = []string{"Authorization", "Cache-Control", "Content-Encoding", "Content-Length", "Content-Range", "Content-Type",
	"Host", "Location", "Proxy-Status", "Retry-After", "Set-Cookie", "Www-Authenticate", outcome.HeaderShouldRetry, outcome.HeaderStripeShouldRetry}

// relayedTrailer keeps the end-to-end trailer fields that came.
func relayedTrailer(h http.Header) http.Header {
	out := relayedHeader(h)
	for name, values := range out {
		if len(values) == 0 || slices.Contains(notInTrailers, name) {
			delete(out, name)
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}
