package main

import (
	"encoding/json"
	"net"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"

	"waybill/configs"
	"waybill/internal/config"
)

// vocabulary holds the words of the configuration's schema: every other word of a configuration is
// one that somebody chose.
type vocabulary struct{ keys, values map[string]bool }

func (w vocabulary) key(k string) bool { return w.keys[k] }

func schemaWords() vocabulary {
	w := vocabulary{keys: map[string]bool{}, values: map[string]bool{"true": true, "false": true}}
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			if props, ok := v["properties"].(map[string]any); ok {
				for k := range props {
					w.keys[k] = true
				}
			}
			list, _ := v["enum"].([]any)
			for _, e := range append(list, v["const"], v["default"]) {
				if s, ok := e.(string); ok {
					w.values[s] = true
				}
			}
			for _, c := range v {
				walk(c)
			}
		case []any:
			for _, c := range v {
				walk(c)
			}
		}
	}
	var doc any
	if json.Unmarshal(configs.ConfigSchema, &doc) == nil {
		walk(doc)
	}
	return w
}

var (
	urlLike  = regexp.MustCompile(`(?i)[a-z][a-z0-9+.-]*://[^\s"',)]+`)
	pathLike = regexp.MustCompile(`(?:/[^\s/"',:;()]+){2,}/?`)
	userLike = regexp.MustCompile(`[^\s/"']+:[^\s/"']+@[^\s"']+`)
	ipv4Like = regexp.MustCompile(`\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b`)
	// ipv6Like finds what may be an address; netip says whether it is one.
	ipv6Like = regexp.MustCompile(`[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?:%[0-9A-Za-z_.-]+)?`)
	hostLike = regexp.MustCompile(`\b(?:[a-zA-Z0-9_-]+\.)+[a-zA-Z]{2,}(?::\d+)?\b`)
	// portLike is a name of one label with a port, and lookupLike one that a resolver was
	// asked for: Go's errors say "dial tcp: lookup db on …".
	portLike   = regexp.MustCompile(`(^|[\s"'(=@,\[])([A-Za-z0-9_-]*[A-Za-z][A-Za-z0-9_-]*)(:\d{1,5})\b`)
	lookupLike = regexp.MustCompile(`(\blookup )([^\s:,]+)`)
	plainWord  = regexp.MustCompile(`^([0-9.]+[a-zA-Z]{0,3}|[A-Z]{3,7})$`) // a number, a duration, a size, a method
)

// hider makes a text fit for others: without the machine's paths and names, what the
// configuration names, addresses, and the values of every variable that may be a secret.
func (a *app) hider(d *doctor, known vocabulary) func(string) string {
	var exact, names []string // values wherever they stand; names as whole words
	for _, kv := range a.environ {
		name, v, ok := strings.Cut(kv, "=")
		if !ok {
			continue
		}
		if len(v) >= 6 && v != "/bin/sh" {
			exact = append(exact, v)
		}
		switch strings.ToUpper(name) {
		case "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY":
			names = append(names, hostName(v))
		case "NO_PROXY":
			for part := range strings.SplitSeq(v, ",") {
				names = append(names, hostName(strings.TrimLeft(strings.TrimSpace(part), ".*")))
			}
		case "HOSTNAME", "HOST", "USER", "LOGNAME":
			names = append(names, v)
		}
		if u, err := url.Parse(v); err == nil && u.Scheme != "" && u.Host != "" {
			names = append(names, u.Hostname())
		}
	}
	if host, err := os.Hostname(); err == nil {
		first, _, _ := strings.Cut(host, ".")
		names = append(names, host, first)
	}
	exact = append(exact, d.data, a.configPath())
	for _, v := range config.Names(a.configPath(), known.key) {
		if known.values[v] || plainWord.MatchString(v) {
			continue
		}
		names = append(names, v, hostName(v))
	}
	if d.cfg != nil {
		exact = append(exact, d.cfg.credentials.IDs()...)
		for _, r := range d.cfg.snapshot.Routes() {
			exact = append(append(exact, r.Name), r.Match.Hosts...)
		}
	}
	exact = slices.DeleteFunc(exact, func(s string) bool { return len(s) < 3 })
	longest := func(x, y string) int { return len(y) - len(x) }
	slices.SortFunc(exact, longest)
	slices.SortFunc(names, longest)
	names = slices.DeleteFunc(slices.Compact(names), func(s string) bool { return s == "" || s == "localhost" || net.ParseIP(s) != nil })
	return func(s string) string {
		for _, v := range exact {
			s = strings.ReplaceAll(s, v, "<hidden>")
		}
		for _, v := range names {
			s = replaceWord(s, v, "<name>")
		}
		return hideAddresses(s)
	}
}

// hostName is the host in a URL, an address or a name; "" where there is none.
func hostName(v string) string {
	if !strings.Contains(v, "://") {
		v = "any://" + v
	}
	u, err := url.Parse(v)
	if err != nil {
		return ""
	}
	return u.Hostname()
}

// replaceWord replaces word where no letter, digit or underscore goes on.
func replaceWord(s, word, by string) string {
	var b strings.Builder
	for from := 0; ; {
		i := strings.Index(s[from:], word)
		if i < 0 {
			b.WriteString(s[from:])
			return b.String()
		}
		start, end := from+i, from+i+len(word)
		if start > 0 && inWord(s[start-1]) && inWord(word[0]) || end < len(s) && inWord(s[end]) && inWord(word[len(word)-1]) {
			b.WriteString(s[from : start+1])
			from = start + 1
			continue
		}
		b.WriteString(s[from:start])
		b.WriteString(by)
		from = end
	}
}

func inWord(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c >= 0x80
}

// hideAddresses replaces what looks like a URL, a path, an address or a host's name. What
// is this machine alone – loopback, and what stands for every address – stays.
func hideAddresses(s string) string {
	s = urlLike.ReplaceAllString(s, "<url>")
	s = userLike.ReplaceAllString(s, "<hidden>")
	s = pathLike.ReplaceAllString(s, "<path>")
	s = ipv6Like.ReplaceAllStringFunc(s, func(m string) string {
		// A port, or the colon of a sentence, may follow.
		for end := len(m); end > 1; end-- {
			if ip, err := netip.ParseAddr(m[:end]); err == nil && ip.Is6() {
				if own(ip) {
					return m
				}
				return "<address>" + m[end:]
			}
		}
		return m
	})
	s = ipv4Like.ReplaceAllStringFunc(s, func(m string) string {
		if ip, err := netip.ParseAddr(m); err == nil && own(ip) {
			return m
		}
		return "<address>"
	})
	s = lookupLike.ReplaceAllString(s, "${1}<name>")
	s = portLike.ReplaceAllStringFunc(s, func(m string) string {
		parts := portLike.FindStringSubmatch(m)
		if parts[2] == "localhost" || parts[2] == doctorHost {
			return m
		}
		return parts[1] + "<name>" + parts[3]
	})
	return hostLike.ReplaceAllStringFunc(s, func(h string) string {
		if h == doctorHost || strings.HasSuffix(h, ".yaml") || strings.HasSuffix(h, ".pem") {
			return h
		}
		return "<name>"
	})
}

func own(ip netip.Addr) bool { ip = ip.Unmap(); return ip.IsLoopback() || ip.IsUnspecified() }
