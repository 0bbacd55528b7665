package inject

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net/url"
	"strings"

	"waybill/outcome"
)

// The further injection modes, as they are recorded.
const (
	ModeCookie            = "cookie"
	ModeQuery             = "query"
	ModeBody              = "body"
	ModeHMAC              = "hmac"
	ModeSigV4             = "sigv4"
	ModeClientCertificate = "client_certificate"
)

// CheckCookieName says whether name can name a cookie (RFC 6265 §4.1.1).
func CheckCookieName(name string) error {
	if !isToken(name) {
		return unsupported(ReasonHeader, 0)
	}
	return nil
}

// SetCookie returns the Cookie field lines with the one cookie set last and the
// caller's own ones of that name left out. The value must be cookie octets: what is
// not is CREDENTIAL_INVALID.
func SetCookie(lines []string, name, value string) (string, error) {
	for i := range len(value) {
		if c := value[i]; c <= ' ' || c > '~' || c == '"' || c == ',' || c == ';' || c == '\\' {
			return "", invalid(ReasonControlByte, 0)
		}
	}
	var b strings.Builder
	for _, line := range lines {
		for pair := range strings.SplitSeq(line, ";") {
			pair = strings.Trim(pair, " \t")
			if n, _, _ := strings.Cut(pair, "="); pair == "" || strings.Trim(n, " \t") == name {
				continue
			}
			b.WriteString(pair + "; ")
		}
	}
	b.WriteString(name + "=" + value)
	return b.String(), nil
}

// HasCookie reports whether a cookie of that name is there.
func HasCookie(lines []string, name string) bool {
	for _, line := range lines {
		for pair := range strings.SplitSeq(line, ";") {
			if n, _, _ := strings.Cut(pair, "="); strings.Trim(n, " \t") == name {
				return true
			}
		}
	}
	return false
}

// StripQuery removes the parameters that name names, however it is spelled, and
// reports whether there were any.
func StripQuery(query, name string) (rest string, found bool) {
	if query == "" {
		return "", false
	}
	kept := make([]string, 0, 8)
	for pair := range strings.SplitSeq(query, "&") {
		n, _, _ := strings.Cut(pair, "=")
		if plain, err := url.QueryUnescape(n); err == nil && plain == name {
			found = true
			continue
		}
		kept = append(kept, pair)
	}
	if !found {
		return query, false
	}
	return strings.Join(kept, "&"), true
}

// AppendQuery adds a parameter, percent-encoded.
func AppendQuery(query, name, value string) string {
	pair := url.QueryEscape(name) + "=" + strings.ReplaceAll(url.QueryEscape(value), "+", "%20")
	if query == "" {
		return pair
	}
	return query + "&" + pair
}

// MaxBody bounds a request body that a secret is put into, in bytes: it is held in
// memory, never on disk (CONTRACT C2).
const MaxBody = 8 << 20

// ParsePointer reads a JSON pointer (RFC 6901) to a member of objects: no array
// elements, not the whole document.
func ParsePointer(s string) ([]string, error) {
	if len(s) < 2 || s[0] != '/' || len(s) > 1<<10 {
		return nil, unsupported(ReasonTemplate, 1)
	}
	parts := strings.Split(s[1:], "/")
	for i, p := range parts {
		if p == "" || strings.Contains(strings.NewReplacer("~0", "", "~1", "").Replace(p), "~") {
			return nil, unsupported(ReasonTemplate, 1)
		}
		parts[i] = strings.NewReplacer("~1", "/", "~0", "~").Replace(p)
	}
	return parts, nil
}

// SetJSON sets the member at path of a JSON object to the string value and leaves every
// other byte as it is. Objects on the way that are missing are made. A body that is no
// object, that has a member twice on the way, or another kind of value where an object
// should be, is INJECTION_UNSUPPORTED.
func SetJSON(body []byte, path []string, value string) ([]byte, error) {
	at, err := findJSON(body, path)
	if err != nil {
		return nil, err
	}
	text, err := jsonString(value)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.Grow(len(body) + len(text) + 64)
	b.Write(body[:at.start])
	if at.missing != nil {
		if at.comma {
			b.WriteByte(',')
		}
		for i, name := range at.missing {
			key, err := jsonString(name)
			if err != nil {
				return nil, err
			}
			if i > 0 {
				b.WriteByte('{')
			}
			b.Write(key)
			b.WriteByte(':')
		}
		b.Write(text)
		b.WriteString(strings.Repeat("}", len(at.missing)-1))
	} else {
		b.Write(text)
	}
	b.Write(body[at.end:])
	return b.Bytes(), nil
}

// HasJSON reports whether the member at path is there.
func HasJSON(body []byte, path []string) bool {
	at, err := findJSON(body, path)
	return err == nil && at.missing == nil
}

func jsonString(s string) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		return nil, unsupported(ReasonBody, 0)
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

// jsonPlace is the bytes of a value, or where the members that are missing go.
type jsonPlace struct {
	start, end int
	missing    []string
	comma      bool
}

func findJSON(body []byte, path []string) (jsonPlace, error) {
	bad := unsupported(ReasonBody, 0)
	if !json.Valid(body) {
		return jsonPlace{}, bad
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	var place *jsonPlace
	// object walks the members of an object whose "{" was read.
	var object func(path []string) error
	object = func(path []string) error {
		seen, members := false, 0
		for dec.More() {
			members++
			key, err := dec.Token()
			if err != nil {
				return bad
			}
			if key != path[0] {
				if err := skipJSON(dec); err != nil {
					return bad
				}
				continue
			}
			if seen {
				return bad // which of the two the service reads is anybody's guess
			}
			seen = true
			if len(path) > 1 {
				if d, err := dec.Token(); err != nil || d != json.Delim('{') {
					return bad
				}
				if err := object(path[1:]); err != nil {
					return err
				}
				continue
			}
			before := int(dec.InputOffset())
			if err := skipJSON(dec); err != nil {
				return bad
			}
			start := before + bytes.IndexByte(body[before:], ':') + 1
			for start < len(body) && strings.IndexByte(" \t\r\n", body[start]) >= 0 {
				start++
			}
			place = &jsonPlace{start: start, end: int(dec.InputOffset())}
		}
		end, err := dec.Token()
		if err != nil || end != json.Delim('}') {
			return bad
		}
		if !seen {
			at := int(dec.InputOffset()) - 1
			place = &jsonPlace{start: at, end: at, missing: path, comma: members > 0}
		}
		return nil
	}
	if d, err := dec.Token(); err != nil || d != json.Delim('{') {
		return jsonPlace{}, bad
	}
	if err := object(path); err != nil {
		return jsonPlace{}, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) || place == nil {
		return jsonPlace{}, bad
	}
	return *place, nil
}

func skipJSON(dec *json.Decoder) error {
	var raw json.RawMessage
	return dec.Decode(&raw)
}

// ClientCertificate reads a chain and its private key, PEM blocks in one text. What
// cannot be read, or does not fit together, is CREDENTIAL_INVALID.
func ClientCertificate(s Secret) (tls.Certificate, error) {
	text := s.Expose()
	defer clear(text)
	var certs, keys []byte
	for rest := text; ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type == "CERTIFICATE" {
			certs = append(certs, pem.EncodeToMemory(block)...)
		} else {
			keys = append(keys, pem.EncodeToMemory(block)...)
		}
	}
	defer clear(keys)
	c, err := tls.X509KeyPair(certs, keys)
	if err != nil {
		return tls.Certificate{}, &Error{Code: outcome.CodeCredentialInvalid, Reason: ReasonMalformed, cause: errBadPair}
	}
	return c, nil
}

var errBadPair = errors.New("inject: no certificate with its key")
