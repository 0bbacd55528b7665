package config

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"
	"gopkg.in/yaml.v3"

	"waybill/routes"
)

var (
	sshSchema = schema{
		keys: []string{"users", "commands", "credential", "passphrase", "certificate", "agent", "agent_key", "known_hosts", "pins", "env", "jump", "sessions", "keepalive"},
		hints: map[string]string{
			"user": "write users: [name]", "command": "write commands: with one pattern each", "key": "write credential: with the name of a credential that holds the private key",
			"identity_file": "write credential: with the name of a credential that holds the private key", "host": "write it under match:", "port": "write ports: under match:",
			"strict_host_key_checking": "host keys are always verified; write known_hosts: or pins:",
		},
	}
	commandSchema = schema{
		keys:  []string{"exact", "argv", "regexp", "repeatable", "exit_status", "grace", "reconcile"},
		hints: map[string]string{"command": "write exact:, argv: or regexp:", "glob": "write argv: with a pattern for each word"},
	}
	confirmSchema = schema{keys: []string{"command", "committed_when", "rejected_when", "visible_after", "background", "every", "max_every", "tries"}}
	verdictSchema = schema{keys: []string{"exit_status", "stdout"}}
	jumpSchema    = schema{keys: []string{"host", "port", "user", "credential", "passphrase", "certificate"}}

	// sshRouteKeys are what a route with ssh: may have besides.
	sshRouteKeys = []string{"name", "match", "ssh", "approval", "leak", "callers", "upstream", "limits", "durability"}
	// sshUpstreamKeys are those of upstream: that go with it.
	sshUpstreamKeys = []string{"resolve", "allow_private", "proxy"}
)

// ssh reads the block that makes a route one for commands.
func (r *reader) ssh(route *object, n *yaml.Node, path string, rt *routes.Route, creds *credentials) *routes.SSH {
	o := r.object(n, path, sshSchema)
	if o == nil {
		return nil
	}
	for _, key := range routeSchema.keys {
		if route.has(key) && !contains(sshRouteKeys, key) {
			r.fail(route.key(key), join(route.path, key), "does not go with ssh:", "remove it; what is known of a command is written beside its pattern")
		}
	}
	if m, mpath, ok := route.get("match"); ok && (len(rt.Match.Methods) > 0 || len(rt.Match.Paths) > 0) {
		r.fail(m, mpath, "names methods or paths, which commands do not have", "keep host: and ports:; users and commands are written under ssh:")
	}
	s := &routes.SSH{}
	s.Users = r.needTexts(o, "users", "a user name", "[deploy]", func(v string) (string, string, string) {
		if !routes.IsSSHUser(v) {
			return "", "is no usable user name", "write the name of one remote user"
		}
		return v, "", ""
	})
	if c, cpath, ok := o.get("commands"); ok {
		s.Commands = r.commands(c, cpath)
	} else {
		r.fail(o.node, join(path, "commands"), "is missing", "add commands: with at least one pattern; what no pattern takes is refused")
	}
	s.Key = r.keyCredential(o, "credential", creds, true)
	s.Passphrase = r.keyCredential(o, "passphrase", creds, false)
	s.Certificate = r.keyCredential(o, "certificate", creds, true)
	if a, ok := o.text("agent", "the path of an agent's socket"); ok {
		s.Agent = r.relative(a)
	}
	if f, ok := o.text("agent_key", "a fingerprint such as SHA256:…"); ok {
		if !isFingerprint(f) {
			n, path, _ := o.get("agent_key")
			r.fail(n, path, "is no fingerprint", "write what ssh-add -l prints, SHA256: and 43 characters")
		}
		s.AgentKey = f
	}
	switch {
	case o.has("credential") && o.has("agent"):
		r.fail(o.key("agent"), join(path, "agent"), "contradicts credential", "keep one of them")
	case !o.has("credential") && !o.has("agent"):
		r.fail(o.node, join(path, "credential"), "is missing", "add credential: with the name of a credential that holds the private key, or agent: with a socket")
	case o.has("agent") != o.has("agent_key"):
		r.fail(o.node, join(path, "agent_key"), "goes with agent", "name both: the agent's socket and the fingerprint of the one key that is used")
	case o.has("agent") && o.has("passphrase"):
		r.fail(o.key("passphrase"), join(path, "passphrase"), "does not go with agent", "remove it; the agent opened its keys")
	}
	s.KnownHosts = r.knownHosts(o)
	s.Pins = o.texts("pins", "a fingerprint such as SHA256:…", "[\"SHA256:…\"]", func(v string) (string, string, string) {
		if !isFingerprint(v) {
			return "", "is no fingerprint", "write SHA256: and 43 characters, as ssh-keygen -lf prints"
		}
		return v, "", ""
	})
	if !o.has("known_hosts") && !o.has("pins") {
		r.fail(o.node, join(path, "known_hosts"), "is missing", "add known_hosts: with the path of a known_hosts file, or pins: with fingerprints")
	}
	s.Env = o.texts("env", "a variable's name", "[LANG, \"LC_*\"]", func(v string) (string, string, string) {
		if !routes.IsEnvPattern(v) {
			return "", "is no name of a variable", "write a name, or the beginning of one and *"
		}
		if strings.HasPrefix(v, "WAYBILL_") && v != routes.EnvActionID {
			return "", "is a variable of Waybill's own", "remove it; only " + routes.EnvActionID + " can be passed on"
		}
		return v, "", ""
	})
	if j, jpath, ok := o.get("jump"); ok {
		s.Jump = r.jump(j, jpath, creds)
	}
	if n, path, ok := o.get("sessions"); ok {
		s.Sessions, _ = r.integer(n, path, 1, 1000)
	}
	s.Keepalive = o.duration("keepalive", time.Second, time.Hour)
	if up, upath, ok := route.get("upstream"); ok {
		if m, ok := r.deref(up, upath); ok && m.Kind == yaml.MappingNode {
			for i := 0; i+1 < len(m.Content); i += 2 {
				if k := m.Content[i]; !contains(sshUpstreamKeys, k.Value) && contains(upstreamSchema.keys, k.Value) {
					r.fail(k, join(upath, k.Value), "does not go with ssh:", "remove it; a host is verified by known_hosts: or pins: under ssh:")
				}
			}
		}
	}
	if rt.Upstream.Proxy != nil {
		up, upath, _ := route.get("upstream")
		r.fail(up, join(upath, "proxy"), "does not go with ssh:", "remove it; ssh.jump leads through another host")
	}
	if rt.Limits.Connect == 0 {
		rt.Limits.Connect = routes.DefaultSSHDeadline
	}
	return s
}

// needTexts is texts for a list that must be there.
func (r *reader) needTexts(o *object, key, what, example string, check func(string) (string, string, string)) []string {
	if !o.has(key) {
		r.fail(o.node, join(o.path, key), "is missing", "add "+key+": "+example)
		return nil
	}
	return o.texts(key, what, example, check)
}

func (r *reader) commands(n *yaml.Node, path string) []routes.Command {
	var out []routes.Command
	count := 0
	listed := r.items(n, path, "[{exact: uptime}, {argv: [systemctl, restart, \"app-*\"]}]", func(n *yaml.Node, path string) {
		count++
		o := r.object(n, path, commandSchema)
		if o == nil {
			return
		}
		before := len(r.problems)
		var c routes.Command
		forms := 0
		for _, key := range []string{"exact", "argv", "regexp"} {
			if o.has(key) {
				forms++
			}
		}
		if forms != 1 {
			r.fail(o.node, path, "has not exactly one of exact, argv and regexp", "write one of them")
			return
		}
		c.Exact, _ = o.text("exact", "a command line")
		c.Regexp, _ = o.text("regexp", "an expression")
		if o.has("argv") {
			c.Argv = r.words(o)
		}
		c.Repeatable = o.boolean("repeatable", false)
		c.ExitAuthoritative = o.enum("exit_status", "plain", "authoritative") == 1
		c.Grace = o.duration("grace", time.Millisecond, time.Minute)
		if v, vpath, ok := o.get("reconcile"); ok {
			c.Reconcile = r.confirm(v, vpath)
		}
		if len(r.problems) > before {
			return
		}
		if err := routes.CheckCommand(&c); err != nil {
			r.fail(o.node, path, err.Error(), "correct the pattern (RE2 syntax for regexp; * ** ? and a final ... for argv)")
			return
		}
		out = append(out, c)
	})
	if listed && count == 0 {
		r.fail(n, path, "is an empty list", "add a pattern; what no pattern takes is refused")
	}
	return out
}

// words reads argv, whose entries may repeat.
func (r *reader) words(o *object) []string {
	n, path, _ := o.get("argv")
	var out []string
	if r.items(n, path, "[systemctl, restart, \"app-*\"]", func(n *yaml.Node, path string) {
		if s, ok := r.text(n, path, "a word"); ok {
			out = append(out, s)
		}
	}) && len(out) == 0 {
		r.fail(n, path, "is an empty list", "write a pattern for each word")
	}
	return out
}

func (r *reader) confirm(n *yaml.Node, path string) *routes.Confirm {
	o := r.object(n, path, confirmSchema)
	if o == nil {
		return nil
	}
	c := &routes.Confirm{}
	c.Command, _ = o.need("command", "a command that tells what became of the first one")
	c.CommittedWhen = r.verdict(o, "committed_when")
	c.RejectedWhen = r.verdict(o, "rejected_when")
	if c.CommittedWhen == nil && c.RejectedWhen == nil {
		r.fail(o.node, path, "has no rule", "add committed_when: {exit_status: [0]}")
	}
	c.VisibleAfter = o.duration("visible_after", time.Millisecond, day)
	if n, path, ok := o.get("rejected_when"); ok && !o.has("visible_after") {
		r.fail(n, path, "needs the longest time until an effect shows: a command whose connection was lost may go on", "add visible_after: 10m beside it")
	}
	c.Manual = !o.boolean("background", true)
	c.Every, c.MaxEvery = o.duration("every", 10*time.Millisecond, day), o.duration("max_every", 10*time.Millisecond, day)
	if n, path, ok := o.get("tries"); ok {
		c.Tries, _ = r.integer(n, path, 1, 100)
	}
	return c
}

func (r *reader) verdict(o *object, key string) *routes.Verdict {
	n, path, ok := o.get(key)
	if !ok {
		return nil
	}
	v := r.object(n, path, verdictSchema)
	if v == nil {
		return nil
	}
	out := &routes.Verdict{ExitStatus: v.integers("exit_status", "[0]", 0, 255)}
	if s, ok := v.text("stdout", "an expression"); ok {
		if _, err := regexp.Compile(s); err != nil {
			n, path, _ := v.get("stdout")
			r.fail(n, path, "is no expression (RE2)", "correct it")
		}
		out.Stdout = s
	}
	if len(out.ExitStatus) == 0 && out.Stdout == "" {
		r.fail(v.node, path, "takes everything", "add exit_status: or stdout:")
	}
	return out
}

// jumpHost looks ahead for the jump host of an ssh block; "" where there is none. What is
// wrong with it is told when the block is read.
func jumpHost(n *yaml.Node) string {
	for _, key := range []string{"jump", "host"} {
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		if n.Kind != yaml.MappingNode {
			return ""
		}
		var next *yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				next = n.Content[i+1]
			}
		}
		if next == nil {
			return ""
		}
		n = next
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	host, err := routes.ParseHostPattern(n.Value)
	if err != nil {
		return ""
	}
	return host
}

func (r *reader) jump(n *yaml.Node, path string, creds *credentials) *routes.Jump {
	o := r.object(n, path, jumpSchema)
	if o == nil {
		return nil
	}
	j := &routes.Jump{Port: routes.DefaultSSHPort}
	if h, ok := o.need("host", "a host name"); ok {
		n, path, _ := o.get("host")
		host, wrong, fix := r.hostPattern(n, path, h)
		if wrong == "" && strings.HasPrefix(host, "*.") {
			wrong, fix = "is no single host", "name one host"
		}
		if wrong != "" {
			r.fail(n, path, wrong, fix)
		}
		j.Host = host
	}
	if n, path, ok := o.get("port"); ok {
		j.Port, _ = r.integer(n, path, 1, 65535)
	}
	if u, ok := o.need("user", "a user name"); ok {
		if !routes.IsSSHUser(u) {
			n, path, _ := o.get("user")
			r.fail(n, path, "is no usable user name", "write the name of one remote user")
		}
		j.User = u
	}
	if !o.has("credential") {
		r.fail(o.node, join(path, "credential"), "is missing", "add credential: with the name of a credential that holds the private key")
	}
	j.Key = r.keyCredential(o, "credential", creds, true)
	j.Passphrase = r.keyCredential(o, "passphrase", creds, false)
	j.Certificate = r.keyCredential(o, "certificate", creds, true)
	return j
}

// keyCredential reads the name of a credential. One that holds a key or a certificate
// has several lines, and is not for fields of requests.
func (r *reader) keyCredential(o *object, key string, creds *credentials, lines bool) string {
	s, ok := o.text(key, "the name of a credential")
	if !ok {
		return ""
	}
	c := creds.byID[s]
	switch {
	case c != nil:
		if c.uses != 0 && c.Multiline != lines {
			n, path, _ := o.get(key)
			r.fail(n, path, "is used for a key and for a value of one line", "define two credentials")
		}
		c.used = true
		c.uses++
		if lines {
			c.Multiline = true
		}
	case !creds.broken[s]:
		n, path, _ := o.get(key)
		fix := "define it under credentials:"
		names := make([]string, len(creds.list))
		for i, c := range creds.list {
			names[i] = c.ID
		}
		if near := nearestName(s, names); near != "" {
			fix = "did you mean " + near + "?"
		}
		r.fail(n, path, "there is no such credential", fix)
	}
	return s
}

// knownHosts reads one file or several. Comments and blank lines are kept: messages
// count lines.
func (r *reader) knownHosts(o *object) []byte {
	n, path, ok := o.get("known_hosts")
	if !ok {
		return nil
	}
	var files []string
	if d, ok := r.deref(n, path); ok && d.Kind == yaml.SequenceNode {
		files = o.texts("known_hosts", "a path", "[known_hosts]", func(s string) (string, string, string) { return s, "", "" })
	} else if s, ok := o.text("known_hosts", "the path of a known_hosts file"); ok {
		files = []string{s}
	}
	var out bytes.Buffer
	for _, f := range files {
		name := r.relative(f)
		r.read = append(r.read, name)
		data, err := r.readFile(name)
		if err != nil {
			r.fail(n, path, "cannot be read: "+err.Error(), "check the path (relative to the folder of this file) and its permissions")
			return nil
		}
		if line := badKnownHosts(data); line > 0 {
			r.fail(n, path, fmt.Sprintf("line %d of the file is no line of a known_hosts file", line), "correct it: names, key type and key; @cert-authority or @revoked before them")
			return nil
		}
		out.Write(bytes.TrimRight(data, "\n"))
		out.WriteByte('\n')
	}
	return out.Bytes()
}

// badKnownHosts returns the number of the first line that is none; 0: there is none.
func badKnownHosts(data []byte) int {
	number := 0
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		number++
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		marker, _, _, _, _, err := ssh.ParseKnownHosts(line)
		if err != nil || marker != "" && marker != "cert-authority" && marker != "revoked" {
			return number
		}
	}
	return 0
}

// isFingerprint reports whether s is a SHA-256 fingerprint as OpenSSH writes it.
func isFingerprint(s string) bool {
	digits, ok := strings.CutPrefix(s, "SHA256:")
	if !ok || len(digits) != 43 {
		return false
	}
	for _, c := range digits {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '+' || c == '/') {
			return false
		}
	}
	return true
}
