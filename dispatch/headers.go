package dispatch

import (
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

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
	for name := range h {
		if strings.HasPrefix(name, "Waybill-") {
			delete(h, name)
		}
	}
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
		names = append(names, r.Inject[i].Header)
	}
	if !r.PassAuthorization {
		names = append(names, "Authorization", "Cookie")
	}
	return names
}

// outgoingHeader builds the fields that are forwarded, without the injected ones
// (DESIGN 1.3). The submission's header is not changed.
func outgoingHeader(s *Submission, r *routes.Route, pseudonym string) (http.Header, *Refusal) {
	h := s.Header.Clone()
	if h == nil {
		h = make(http.Header)
	}
	if refusal := checkUpgrade(h); refusal != nil {
		return nil, refusal
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
		if _, sent := h[name]; !sent {
			continue
		}
		if r.RejectManaged {
			return nil, refusal(outcome.CodeHeaderForbidden, "request.headers."+strings.ToLower(name), "managed_field",
				"This route sets the field itself; send the request without it.")
		}
		delete(h, name)
	}
	// The body was spooled: Waybill answered a 100-continue itself, and frames the
	// request anew.
	h.Del("Expect")
	h.Del("Content-Length")
	h.Del("Host")
	if _, sent := h["User-Agent"]; !sent {
		h["User-Agent"] = []string{""} // net/http adds its own otherwise
	}
	h.Add("Via", viaVersion(s.Protocol)+" "+pseudonym)
	return h, nil
}

func refusal(code outcome.Code, field, reason, detail string) *Refusal {
	f, _ := outcome.Of(code)
	return &Refusal{Facts: f, Field: field, Reason: reason, Detail: detail}
}

// checkUpgrade refuses protocol upgrades (Q10). "h2c" is left out of the request
// instead: curl and Java offer it on every plain request.
func checkUpgrade(h http.Header) *Refusal {
	for _, line := range h["Upgrade"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.TrimSpace(name); name != "" && !strings.EqualFold(name, "h2c") {
				return refusal(outcome.CodeUnsupportedAction, "request.headers.upgrade", "upgrade", "Protocol upgrades are not carried on this route.")
			}
		}
	}
	return nil
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
	out := h.Clone()
	if out == nil {
		out = make(http.Header)
	}
	removeHopByHop(out)
	removeOwn(out)
	return out
}
