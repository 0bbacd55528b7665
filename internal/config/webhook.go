package config

import (
	"time"

	"gopkg.in/yaml.v3"
)

// Approvals says how people outside of this machine are asked and answer (CONTRACT D4).
// It is read at a start.
type Approvals struct {
	// URL is told of each approval that is asked for; "": nobody is. NotifyKey names the
	// credential that signs.
	URL       string
	NotifyKey string
	RootsFile string
	Timeout   time.Duration
	// Listen takes signed decisions, DecisionKey names the credential they are signed
	// with; "": none.
	Listen      string
	DecisionKey string
}

var (
	approvalsSchema = schema{keys: []string{"notify", "decisions"}}
	notifySchema    = schema{
		keys:  []string{"url", "key", "roots", "timeout"},
		hints: map[string]string{"secret": "write key: with the name of a credential", "credential": "write key: with the name of a credential"},
	}
	decisionsSchema = schema{
		keys:  []string{"listen", "key"},
		hints: map[string]string{"secret": "write key: with the name of a credential", "credential": "write key: with the name of a credential"},
	}
)

const defaultNotifyTimeout = 10 * time.Second

func (r *reader) approvals(n *yaml.Node, path string, creds *credentials) (a Approvals) {
	o := r.object(n, path, approvalsSchema)
	if o == nil {
		return a
	}
	key := func(o *object) string {
		s, ok := o.need("key", "the name of a credential")
		if !ok {
			return ""
		}
		return r.takeCredential(o, "key", s, creds, false)
	}
	if n, path, ok := o.get("notify"); ok {
		if o := r.object(n, path, notifySchema); o != nil {
			a.URL, a.NotifyKey, a.RootsFile = o.endpoint("url", true), key(o), o.rootsFile()
			if a.Timeout = o.duration("timeout", time.Second, time.Minute); a.Timeout == 0 {
				a.Timeout = defaultNotifyTimeout
			}
		}
	}
	if n, path, ok := o.get("decisions"); ok {
		if o := r.object(n, path, decisionsSchema); o != nil {
			if s, ok := o.need("listen", "an address such as 127.0.0.1:7175"); ok {
				n, path, _ := o.get("listen")
				if wrong := checkListenAddress(s); wrong != "" {
					r.fail(n, path, wrong, "write host:port, such as 127.0.0.1:7175")
				} else if !IsLoopback(s) {
					r.warn(n, path, "decisions are signed, but their answers travel unencrypted", "listen on 127.0.0.1 behind something that ends TLS")
				}
				a.Listen = s
			}
			a.DecisionKey = key(o)
		}
	}
	return a
}
