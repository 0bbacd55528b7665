package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"net/url"
	"strings"
	"time"

	"gopkg.in/yaml.v3"
)

// Audit says whether and how the audit log is written (CONTRACT N1–N5).
type Audit struct {
	// Recipient is the public key that events are sealed to, as "waybill audit keygen"
	// prints it; "": there is no audit log.
	Recipient string
	Folder    string // "": audit in the data folder
	// CheckpointEvery and CheckpointInterval: after so many records, or so long after one.
	CheckpointEvery    int
	CheckpointInterval time.Duration
	To                 []AuditDestination
	Retention          time.Duration // of the log; 0: for good
	MaxSize            int64         // bytes; 0: no limit
}

// AuditDestination is one place that checkpoints are sent to: a file, a command or an
// HTTPS endpoint.
type AuditDestination struct {
	File      string
	Command   []string
	URL       string
	RootsPEM  []byte
	TokenFile string
}

var (
	auditSchema = schema{
		keys:  []string{"recipient", "folder", "checkpoint", "to", "retention", "max_size"},
		hints: map[string]string{"key": "write recipient: with the public key; the private key stays off this machine", "private_key": "the private key stays off this machine; write recipient: with the public key"},
	}
	checkpointSchema       = schema{keys: []string{"every", "interval"}}
	auditDestinationSchema = schema{
		keys:  []string{"file", "command", "url", "roots", "token_file"},
		hints: map[string]string{"token": "write token_file: with the path of a file; secrets are never written in this file"},
	}
)

func (r *reader) audit(n *yaml.Node, path string) Audit {
	a := Audit{CheckpointEvery: 1000, CheckpointInterval: 10 * time.Minute}
	o := r.object(n, path, auditSchema)
	if o == nil {
		return a
	}
	if s, ok := o.need("recipient", "the public key that waybill audit keygen prints"); ok {
		n, path, _ := o.get("recipient")
		if wrong := checkRecipient(s); wrong != "" {
			r.fail(n, path, wrong, "write the public key that waybill audit keygen prints")
		}
		a.Recipient = s
	}
	if s, ok := o.text("folder", "the path of a folder"); ok {
		a.Folder = r.relative(s)
	}
	if n, path, ok := o.get("checkpoint"); ok {
		if c := r.object(n, path, checkpointSchema); c != nil {
			if n, path, ok := c.get("every"); ok {
				if v, ok := r.integer(n, path, 1, 1_000_000); ok {
					a.CheckpointEvery = v
				}
			}
			if d := c.duration("interval", time.Second, 30*24*time.Hour); d > 0 {
				a.CheckpointInterval = d
			}
		}
	}
	if n, path, ok := o.get("to"); ok {
		r.items(n, path, "to: [{file: /mnt/elsewhere/checkpoints}]", func(n *yaml.Node, path string) {
			if len(a.To) == 16 {
				r.fail(n, path, "the list has more than 16 entries", "send them on from there")
				return
			}
			if d, ok := r.auditDestination(n, path); ok {
				a.To = append(a.To, d)
			}
		})
	}
	if d := o.duration("retention", 24*time.Hour, 36500*24*time.Hour); d > 0 {
		a.Retention = d
	}
	if b := o.size("max_size", 64<<20, 1<<44); b > 0 {
		a.MaxSize = b
	}
	return a
}

func (r *reader) auditDestination(n *yaml.Node, path string) (d AuditDestination, ok bool) {
	o := r.object(n, path, auditDestinationSchema)
	if o == nil {
		return d, false
	}
	kinds := 0
	for _, k := range []string{"file", "command", "url"} {
		if o.has(k) {
			kinds++
		}
	}
	if kinds != 1 {
		r.fail(o.node, path, "must be one of file, command, url", "write one entry for each place")
		return d, false
	}
	if s, ok := o.text("file", "the path of a file"); ok {
		d.File = r.relative(s)
	}
	if n, path, ok := o.get("command"); ok {
		r.items(n, path, "command: [/usr/local/bin/keep-checkpoint]", func(n *yaml.Node, path string) {
			if s, ok := r.text(n, path, "a program or an argument"); ok {
				d.Command = append(d.Command, s)
			}
		})
		if len(d.Command) == 0 {
			r.fail(n, path, "is an empty list", "name a program")
		}
	}
	if s, ok := o.text("url", "an https URL"); ok {
		n, path, _ := o.get("url")
		if u, err := url.Parse(s); err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.Fragment != "" {
			r.fail(n, path, "is no https URL without user information", "write https://host/path; a token goes into token_file:")
		}
		d.URL = s
	}
	for _, k := range []string{"roots", "token_file"} {
		if o.has(k) && d.URL == "" {
			r.fail(o.key(k), join(path, k), "is for an endpoint", "remove it, or write url:")
		}
	}
	if s, ok := o.text("roots", "the path of a PEM file"); ok {
		n, path, _ := o.get("roots")
		d.RootsPEM = r.roots(n, path, s)
	}
	if s, ok := o.text("token_file", "the path of a file"); ok {
		d.TokenFile = r.relative(s)
	}
	return d, true
}

// recipientPrefix begins a public key of the audit log (journal/audit has its form).
const recipientPrefix = "wbaudit1_"

func checkRecipient(s string) (wrong string) {
	if strings.HasPrefix(s, recipientPrefix+"secret_") {
		return "is the private key: it must not be on this machine, and is not secret any more if this file was"
	}
	rest, ok := strings.CutPrefix(s, recipientPrefix)
	b, err := base64.RawURLEncoding.Strict().DecodeString(rest)
	if !ok || err != nil || len(b) != 36 {
		return "is no public key of an audit log"
	}
	if sum := sha256.Sum256(append([]byte(recipientPrefix), b[:32]...)); !bytes.Equal(sum[:4], b[32:]) {
		return "is a public key with a wrong character"
	}
	return ""
}
