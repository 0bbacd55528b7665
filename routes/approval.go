package routes

import (
	"errors"
	"strconv"
	"strings"
	"time"
)

// DefaultApprovalExpiry is how long an approval may be decided where the route does
// not say.
const DefaultApprovalExpiry = time.Hour

// Approval says which requests of a route a person has to approve before anything is
// sent (CONTRACT D3, D4, D5). The zero value asks nobody.
type Approval struct {
	Required bool
	// When narrows it: a request that meets one of the rules needs an approval; empty:
	// every request does.
	When []ApprovalRule `json:",omitempty"`
	// Hold is how long the caller waits for the decision before it is told
	// APPROVAL_PENDING; zero: Limits.Hold.
	Hold time.Duration `json:",omitempty"`
	// Expiry is how long the request may be decided and dispatched; zero:
	// DefaultApprovalExpiry.
	Expiry time.Duration `json:",omitempty"`
}

// ApprovalRule selects requests. All conditions that are set must hold.
type ApprovalRule struct {
	Methods []string `json:",omitempty"` // upper case; empty: every method
	Paths   []string `json:",omitempty"` // globs; empty: every path
	// MinBody is the size of the body from which on the rule applies; 0: any.
	MinBody int64 `json:",omitempty"`
}

// NeedsApproval reports whether a request on this route has to be approved. It reads a
// request in the way that asks for more approvals: methods whatever their case, and
// paths also as a lenient server could read them (see Snapshot.Match), so that
// "/v1//charges" does not slip past a rule for "/v1/charges".
func (r *Route) NeedsApproval(method, rawPath string, bodyBytes int64) bool {
	if !r.Approval.Required {
		return false
	}
	if len(r.Approval.When) == 0 {
		return true
	}
	for i := range r.Approval.When {
		if r.Approval.When[i].takes(method, rawPath, bodyBytes) {
			return true
		}
	}
	return false
}

func (u *ApprovalRule) takes(method, rawPath string, bodyBytes int64) bool {
	if bodyBytes < u.MinBody {
		return false
	}
	if len(u.Methods) > 0 {
		found := false
		for _, m := range u.Methods {
			found = found || strings.EqualFold(m, method)
		}
		if !found {
			return false
		}
	}
	if len(u.Paths) == 0 {
		return true
	}
	lenient := reading(rawPath)
	for _, p := range u.Paths {
		g, err := compileGlob(p)
		// A pattern that does not compile is refused by NewSnapshot; here it asks.
		if err != nil || g.match(rawPath) || g.match(lenient) {
			return true
		}
	}
	return false
}

// ApprovalHold is how long a caller waits for the decision.
func (r *Route) ApprovalHold() time.Duration {
	if r.Approval.Hold > 0 {
		return r.Approval.Hold
	}
	return r.Limits.Hold
}

// ApprovalExpiry is how long a request may be decided.
func (r *Route) ApprovalExpiry() time.Duration {
	if r.Approval.Expiry > 0 {
		return r.Approval.Expiry
	}
	return DefaultApprovalExpiry
}

func (a *Approval) clone() Approval {
	c := *a
	c.When = cloneSlice(a.When)
	for i := range c.When {
		c.When[i].Methods = cloneSlice(c.When[i].Methods)
		c.When[i].Paths = cloneSlice(c.When[i].Paths)
	}
	return c
}

func (r *Route) checkApproval() error {
	a := &r.Approval
	switch {
	case a.Hold < 0 || a.Expiry < 0:
		return errors.New("a limit is negative")
	}
	for i := range a.When {
		u := &a.When[i]
		if u.MinBody < 0 {
			return errors.New("a limit is negative")
		}
		for _, m := range u.Methods {
			if !IsMethod(m) || neverForwarded(m) {
				return errors.New("a method is no method, or one that is never forwarded")
			}
		}
		for _, p := range u.Paths {
			if err := CheckGlob(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// explainApproval says what NeedsApproval makes of a request whose body is not known.
func (r *Route) explainApproval(method, rawPath string) string {
	const most = 1<<63 - 1
	if !r.NeedsApproval(method, rawPath, most) {
		return ""
	}
	when := "A person approves it first"
	if !r.NeedsApproval(method, rawPath, 0) {
		least := int64(most)
		for i := range r.Approval.When {
			if u := &r.Approval.When[i]; u.takes(method, rawPath, most) {
				least = min(least, u.MinBody)
			}
		}
		when += " if its body has " + strconv.FormatInt(least, 10) + " bytes or more"
	}
	return when + "; the caller waits " + r.ApprovalHold().String() + ", it may be decided within " + r.ApprovalExpiry().String() + "."
}
