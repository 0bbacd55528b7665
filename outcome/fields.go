package outcome

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/dunglas/httpsfv"
)

// ErrOutcomeField is wrapped by ParseOutcome for a value that is not a
// Waybill-Outcome field.
var ErrOutcomeField = errors.New("not a Waybill-Outcome field")

// Parameter names of the Waybill-Outcome field.
const (
	paramPhase = "phase"
	paramRetry = "retry"
	paramCode  = "code"
)

// FormatOutcome returns the Waybill-Outcome field (CONTRACT L5), a structured
// field item (RFC 9651): "unknown;phase=remote_execution;retry=reconcile;code=REMOTE_TIMEOUT".
// It is "" for facts that cannot be shown, those of ACTION_NOT_FOUND among them.
func FormatOutcome(f Facts) string {
	if f.known() != nil {
		return ""
	}
	// The names of the enumerations are tokens; a test holds that against a library.
	v := f.Outcome.String() + ";" + paramPhase + "=" + f.Phase.String() + ";" + paramRetry + "=" + f.Retry.String()
	if f.Code != CodeNone {
		v += ";" + paramCode + "=" + f.Code.String()
	}
	return v
}

// ParseOutcome reads a Waybill-Outcome field. Its errors wrap ErrUnknownValue for a
// value outside the closed enumerations (CONTRACT A8), else ErrOutcomeField; they
// do not echo the value. Parameters that this build does not know are ignored. The
// combination of facts is not checked: Facts.Validate does.
func ParseOutcome(s string) (Facts, error) {
	item, err := httpsfv.UnmarshalItem([]string{s})
	if err != nil {
		return Facts{}, fmt.Errorf("outcome: no structured item: %w", ErrOutcomeField)
	}
	outcome, ok := item.Value.(httpsfv.Token)
	if !ok {
		return Facts{}, fmt.Errorf("outcome: no token: %w", ErrOutcomeField)
	}
	var f Facts
	if err := f.Outcome.UnmarshalText([]byte(outcome)); err != nil {
		return Facts{}, err
	}
	phase, err := tokenParam(item.Params, paramPhase, true)
	if err != nil {
		return Facts{}, err
	}
	if err := f.Phase.UnmarshalText([]byte(phase)); err != nil {
		return Facts{}, err
	}
	retry, err := tokenParam(item.Params, paramRetry, true)
	if err != nil {
		return Facts{}, err
	}
	if err := f.Retry.UnmarshalText([]byte(retry)); err != nil {
		return Facts{}, err
	}
	code, err := tokenParam(item.Params, paramCode, false)
	if err != nil {
		return Facts{}, err
	}
	if err := f.Code.UnmarshalText([]byte(code)); err != nil {
		return Facts{}, err
	}
	return f, nil
}

func tokenParam(params *httpsfv.Params, name string, required bool) (string, error) {
	v, ok := params.Get(name)
	if !ok && !required {
		return "", nil
	}
	token, isToken := v.(httpsfv.Token)
	if !isToken {
		return "", fmt.Errorf("outcome: parameter %s is missing or no token: %w", name, ErrOutcomeField)
	}
	return string(token), nil
}

// proxyName identifies Waybill in Proxy-Status.
const proxyName = "waybill"

// proxyErrors are the error types of RFC 9209 §2.3. Only these are sent.
var proxyErrors = map[string]bool{
	"dns_timeout": true, "dns_error": true,
	"destination_not_found": true, "destination_unavailable": true, "destination_ip_prohibited": true, "destination_ip_unroutable": true,
	"connection_refused": true, "connection_terminated": true, "connection_timeout": true, "connection_read_timeout": true,
	"connection_write_timeout": true, "connection_limit_reached": true,
	"tls_protocol_error": true, "tls_certificate_error": true, "tls_alert_received": true,
	"http_request_error": true, "http_request_denied": true,
	"http_response_incomplete": true, "http_response_header_section_size": true, "http_response_header_size": true,
	"http_response_body_size": true, "http_response_trailer_section_size": true, "http_response_trailer_size": true,
	"http_response_transfer_coding": true, "http_response_content_coding": true, "http_response_timeout": true,
	"http_upgrade_failed": true, "http_protocol_error": true,
	"proxy_internal_response": true, "proxy_internal_error": true, "proxy_configuration_error": true, "proxy_loop_detected": true,
}

// proxyError returns the error type for Waybill's own answer, or "".
func proxyError(f Facts, s Shape) string {
	r := Lookup(f.Code)
	switch {
	case r.ProxyError == "":
		// Relayed, or of the caller API: nothing went wrong with a next hop.
		return ""
	case proxyErrors[s.ProxyError]:
		return s.ProxyError
	case r.AlertError != "" && (s.AlertID > 0 || s.AlertName != ""):
		return r.AlertError
	default:
		return r.ProxyError
	}
}

// member builds Waybill's own Proxy-Status member (RFC 9209 §2). Text that a
// structured field cannot hold is left out.
func member(errorType string, s Shape) string {
	b := append(make([]byte, 0, 96), proxyName...)
	if errorType != "" {
		b = append(append(b, ";error="...), errorType...)
	}
	switch errorType {
	case "dns_error":
		if isSFString(s.RCode) {
			b = appendSFString(append(b, ";rcode="...), s.RCode)
		}
	case "tls_alert_received":
		if s.AlertID > 0 && s.AlertID <= 255 {
			b = strconv.AppendInt(append(b, ";alert-id="...), int64(s.AlertID), 10)
		}
		switch {
		case isSFToken(s.AlertName):
			b = append(append(b, ";alert-message="...), s.AlertName...)
		case isSFString(s.AlertName):
			b = appendSFString(append(b, ";alert-message="...), s.AlertName)
		}
	}
	if isSFString(s.NextHop) {
		b = appendSFString(append(b, ";next-hop="...), s.NextHop)
	}
	if s.NextProtocol != "" {
		b = append(b, ";next-protocol="...)
		if isSFToken(s.NextProtocol) {
			b = append(b, s.NextProtocol...)
		} else {
			b = append(base64.StdEncoding.AppendEncode(append(b, ':'), []byte(s.NextProtocol)), ':')
		}
	}
	if s.ReceivedStatus >= 100 && s.ReceivedStatus <= 999 {
		b = strconv.AppendInt(append(b, ";received-status="...), int64(s.ReceivedStatus), 10)
	}
	if isSFString(s.Details) {
		b = appendSFString(append(b, ";details="...), s.Details)
	}
	return string(b)
}

// appendMember returns the received Proxy-Status list with our member last.
func appendMember(received []string, own string) string {
	if len(received) == 0 {
		return own
	}
	list, err := httpsfv.UnmarshalList(received)
	if err != nil {
		return own
	}
	keep := list[:0]
	for _, m := range list {
		item, ok := m.(httpsfv.Item)
		if !ok {
			return own // RFC 9209 §2: members are strings or tokens
		}
		var name string
		switch v := item.Value.(type) {
		case httpsfv.Token:
			name = string(v)
		case string:
			name = v
		default:
			return own
		}
		if !strings.EqualFold(name, proxyName) {
			keep = append(keep, item)
		}
	}
	if len(keep) == 0 {
		return own
	}
	v, err := httpsfv.Marshal(keep)
	if err != nil {
		return own
	}
	return v + ", " + own
}

// isSFString reports whether s is not empty and can be a structured-field string.
func isSFString(s string) bool {
	for _, c := range []byte(s) {
		if c < ' ' || c > '~' {
			return false
		}
	}
	return s != ""
}

// appendSFString appends a text that isSFString as a structured-field string (RFC 9651 §4.1.6).
func appendSFString(b []byte, s string) []byte {
	b = append(b, '"')
	for _, c := range []byte(s) {
		if c == '"' || c == '\\' {
			b = append(b, '\\')
		}
		b = append(b, c)
	}
	return append(b, '"')
}

// isSFToken reports whether s can be a structured-field token (RFC 9651 §4.1.7).
func isSFToken(s string) bool {
	for i, c := range []byte(s) {
		alpha := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !alpha && c != '*' && (i == 0 || (c < '0' || c > '9') && strings.IndexByte("!#$%&'+-.^_`|~:/", c) < 0) {
			return false
		}
	}
	return s != ""
}
