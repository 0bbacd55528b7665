package routes

import (
	"strconv"
	"strings"

	"waybill/outcome"
)

// MissKind says which condition the nearest route did not meet. Zero is no miss.
type MissKind uint8

// The kinds.
const (
	MissNone        MissKind = iota
	MissHost                 // no route names the host
	MissPort                 // the host is known, the port is not
	MissPlaintext            // the port is known, but not in clear (http)
	MissPath                 // host and port are known, the path is not
	MissMethod               // host, port and path are known, the method is not
	MissMethodNever          // CONNECT, TRACE, TRACK: on no route
	MissDenied               // only refusing routes name the host, and none takes this request
	MissUser                 // SSH: host and port are known, the user is not
	MissCommand              // SSH: host, port and user are known, the command is not
)

var missNames = [...]string{
	MissNone: "none", MissHost: "host", MissPort: "port", MissPlaintext: "plaintext", MissPath: "path",
	MissMethod: "method", MissMethodNever: "method_never", MissDenied: "denied", MissUser: "user", MissCommand: "command",
}

// String returns a fixed token.
func (k MissKind) String() string {
	if int(k) < len(missNames) {
		return missNames[k]
	}
	return "invalid(" + strconv.Itoa(int(k)) + ")"
}

// Miss says why no route took a request and which one came nearest (CONTRACT L8).
// The zero value is no miss.
type Miss struct {
	Kind MissKind
	// Nearest is the route that came nearest, first in file order among equals; nil for
	// MissHost, MissMethodNever and MissDenied.
	Nearest *Route
}

// Code returns UNSUPPORTED_ACTION for a method that no route can take, else
// ROUTE_NOT_FOUND.
func (m Miss) Code() outcome.Code {
	if m.Kind == MissMethodNever {
		return outcome.CodeUnsupportedAction
	}
	return outcome.CodeRouteNotFound
}

// Field returns the path of the field the caller can correct (CONTRACT B2).
func (m Miss) Field() string {
	switch m.Kind {
	case MissPort:
		return "request.target.port"
	case MissPlaintext:
		return "request.target.scheme"
	case MissPath:
		return "request.target.path"
	case MissMethod, MissMethodNever:
		return "request.method"
	case MissUser:
		return "request.user"
	case MissCommand:
		return "request.command"
	case MissNone, MissHost, MissDenied:
	}
	return "request.target.host"
}

// maxShown bounds how many alternatives a message lists.
const maxShown = 8

// Detail returns one sentence for people: what was not met and what would be
// allowed nearest to it. caller is the caller's name: of a route that the caller may
// not use nothing is told. It holds only what the configuration says, nothing of
// the request.
func (m Miss) Detail(caller string) string {
	switch m.Kind {
	case MissNone:
		return ""
	case MissMethodNever:
		return "CONNECT, TRACE and TRACK are not forwarded on any route."
	case MissHost, MissDenied:
		return "No route names this host."
	case MissPort, MissPlaintext, MissPath, MissMethod, MissUser, MissCommand:
	}
	r := m.Nearest
	if r == nil || !r.AllowsCaller(caller) {
		return "No route takes this request."
	}
	switch m.Kind {
	case MissPlaintext:
		return "Route " + strconv.Quote(r.Name) + " takes this host and port over https only."
	case MissPath:
		return "Route " + strconv.Quote(r.Name) + " takes this host, but only the paths " + listed(r.Match.Paths) + "."
	case MissMethod:
		return "Route " + strconv.Quote(r.Name) + " takes this path, but only with the methods " + listed(r.Match.Methods) + "."
	case MissUser:
		return "Route " + strconv.Quote(r.Name) + " takes this host, but only as " + listed(r.SSH.Users) + "."
	case MissCommand:
		return "Route " + strconv.Quote(r.Name) + " takes this host and user, but only the commands " + listed(commandNames(r.SSH)) + "."
	case MissNone, MissHost, MissPort, MissMethodNever, MissDenied:
	}
	if r.SSH != nil {
		return "Route " + strconv.Quote(r.Name) + " takes this host, but only at " + listed(portNames(r)) + "."
	}
	return "Route " + strconv.Quote(r.Name) + " takes this host, but only at " + listed(endpointNames(r)) + "."
}

func endpointNames(r *Route) []string {
	var out []string
	for _, e := range r.endpoints() {
		switch {
		case !e.plain:
			out = append(out, "https port "+strconv.Itoa(e.port))
		case r.Upstream.AllowPlaintext:
			out = append(out, "http port "+strconv.Itoa(e.port))
		}
	}
	return out
}

// commandNames are the patterns as the configuration writes them.
func commandNames(s *SSH) []string {
	out := make([]string, len(s.Commands))
	for i, c := range s.Commands {
		switch {
		case c.Exact != "":
			out[i] = strconv.Quote(c.Exact)
		case c.Regexp != "":
			out[i] = "/" + c.Regexp + "/"
		default:
			out[i] = strings.Join(c.Argv, " ")
		}
	}
	return out
}

func portNames(r *Route) []string {
	if len(r.Match.Ports) == 0 {
		return []string{"port " + strconv.Itoa(DefaultSSHPort)}
	}
	out := make([]string, len(r.Match.Ports))
	for i, p := range r.Match.Ports {
		out[i] = "port " + strconv.Itoa(p)
	}
	return out
}

func listed(items []string) string {
	if len(items) > maxShown {
		return strings.Join(items[:maxShown], ", ") + " and " + strconv.Itoa(len(items)-maxShown) + " more"
	}
	return strings.Join(items, ", ")
}
