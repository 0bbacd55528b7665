package routes

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// SSH makes a route one for commands over SSH: which users and commands it takes, and
// how the target is reached and verified. Such a route takes no HTTP request.
type SSH struct {
	// Users are the remote users, exact names. At least one.
	Users []string
	// Commands are the commands that may run; the first that matches counts, and what
	// none matches is refused (CONTRACT V1). At least one.
	Commands []Command
	// Key, Passphrase and Certificate are credentials' ids: a private key (OpenSSH or
	// PEM), what opens it, and an OpenSSH certificate for it. "": none.
	Key, Passphrase, Certificate string
	// Agent is the socket of an ssh-agent that holds the key in Key's place, and
	// AgentKey ("SHA256:…") names which of its keys is used.
	Agent, AgentKey string
	// KnownHosts are the lines of known_hosts files; Pins are fingerprints ("SHA256:…")
	// of host keys, any of which is accepted for every host of the route.
	KnownHosts []byte
	Pins       []string
	// Env lists the variables that a caller may set: exact names, or a prefix and "*".
	Env []string
	// Jump is the host through which the target is reached; nil: directly.
	Jump *Jump
	// Sessions bounds the commands that share one connection; 0: 10, as sshd's MaxSessions.
	Sessions int
	// Keepalive is how often a silent connection is asked whether it is there; 0: 15s.
	Keepalive time.Duration
}

// Jump is a jump host. Its host key is verified by the route's KnownHosts and Pins; a pin
// that it matches does not count for the target behind it.
type Jump struct {
	Host                         string
	Port                         int
	User                         string
	Key, Passphrase, Certificate string
}

// Command is one pattern of commands, and what is known of those it takes (CONTRACT
// I8). Exactly one of Exact, Argv and Regexp is set.
type Command struct {
	// Exact is the whole command line, byte for byte.
	Exact string
	// Argv are patterns, one for each word of a command line that holds plain words only
	// (SplitCommand). "*" stands for any run of characters but "/", "**" for any run, "?"
	// for one; "..." as the last element for any further words. What "*", "**" or "?" at
	// the beginning takes does not begin with "-", and none of them takes a ".." between
	// slashes.
	Argv []string
	// Regexp is an expression (RE2) that takes the whole command line.
	Regexp string
	// Repeatable: repeating it has no further effect.
	Repeatable bool
	// ExitAuthoritative: the exit status resolves the command even if its output did not
	// end (CONTRACT G9, G13).
	ExitAuthoritative bool
	// Grace is how long output may stay open, in silence, after the exit status; 0: 2s.
	Grace time.Duration
	// Reconcile is a confirming command; nil: none.
	Reconcile *Confirm
}

// Confirm is a command that tells what became of another one (CONTRACT I8, K6). It runs
// at the target and as the user of that one, with its route's key.
type Confirm struct {
	// Command may hold ${action_id}, and ${1} to ${9} for the groups of Regexp, which are
	// quoted for the shell.
	Command string
	// CommittedWhen and RejectedWhen map its complete result; what neither takes leaves
	// the outcome unknown. nil takes nothing.
	CommittedWhen, RejectedWhen *Verdict
	// VisibleAfter is the longest time from the end of an attempt until its effect shows: a
	// command whose connection was lost may go on. RejectedWhen counts only afterwards.
	VisibleAfter time.Duration
	// Manual, Every, MaxEvery and Tries are as in Reconcile.
	Manual          bool
	Every, MaxEvery time.Duration
	Tries           int
}

// Verdict takes a result by its exit status and its output. All conditions must hold.
type Verdict struct {
	ExitStatus []int  // empty: any
	Stdout     string // an expression (RE2) that is found in it; "": any
}

// Defaults of SSH routes.
const (
	DefaultSSHPort     = 22
	DefaultSessions    = 10
	DefaultKeepalive   = 15 * time.Second
	DefaultGrace       = 2 * time.Second
	DefaultSSHDeadline = 15 * time.Second // connection setup up to authentication
)

// CommandMatch says which rule took a command.
type CommandMatch struct {
	Rule     *Command
	Index    int      // of the rule in its route
	Captures []string // of Regexp, the whole match first; nil without
}

// Captured returns the groups that the confirming command names, by number.
func (m *CommandMatch) Captured() map[string]string {
	out := make(map[string]string)
	for _, v := range confirmVariable.FindAllStringSubmatch(m.Rule.Reconcile.Command, -1) {
		if n, err := strconv.Atoi(v[1]); err == nil && n < len(m.Captures) {
			out[v[1]] = m.Captures[n]
		}
	}
	return out
}

// Render returns the confirming command for an action, or the variable that has no value.
func (c *Confirm) Render(actionID string, captured map[string]string) (command, missing string) {
	command = confirmVariable.ReplaceAllStringFunc(c.Command, func(v string) string {
		name := v[2 : len(v)-1]
		if name == "action_id" {
			return actionID
		}
		value, ok := captured[name]
		if !ok {
			missing = v
		}
		return QuoteWord(value)
	})
	return command, missing
}

// Schedule is how often and from when on it is asked, with the defaults.
func (c *Confirm) Schedule() *Reconcile {
	q := &Reconcile{VisibleAfter: c.VisibleAfter, Manual: c.Manual, Every: c.Every, MaxEvery: c.MaxEvery, Tries: c.Tries}
	or(&q.Every, DefaultReconcileEvery)
	or(&q.MaxEvery, DefaultReconcileMaxEvery)
	or(&q.Tries, DefaultReconcileTries)
	return q
}

// Pattern is the pattern as text, by which a rule is found again.
func (c *Command) Pattern() string {
	switch {
	case c.Exact != "":
		return "exact " + c.Exact
	case c.Regexp != "":
		return "regexp " + c.Regexp
	}
	return "argv " + JoinCommand(c.Argv)
}

// Confirms reports whether a command of the route has a confirming one.
func (r *Route) Confirms() bool {
	return r.SSH != nil && slices.ContainsFunc(r.SSH.Commands, func(c Command) bool { return c.Reconcile != nil })
}

// Confirming is the route of that name if it takes the user at the target, and its rule
// of that pattern, which has a confirming command; else nil. The operator's naming the
// confirming command there is what allows it: no caller can run it by that.
func (s *Snapshot) Confirming(name string, t Target, user, pattern string) (*Route, *Command) {
	for _, c := range s.ssh {
		if c.Name != name || !c.takesHost(t.Host) || !c.takesSSHPort(t.Port) || !slices.Contains(c.SSH.Users, user) {
			continue
		}
		for i := range c.SSH.Commands {
			if rule := &c.SSH.Commands[i]; rule.Reconcile != nil && rule.Pattern() == pattern {
				return &c.Route, rule
			}
		}
	}
	return nil, nil
}

var confirmVariable = regexp.MustCompile(`\$\{(action_id|[1-9])\}`)

// compiledSSH is what matching an SSH route needs.
type compiledSSH struct {
	regexps []*regexp.Regexp // by command; nil where it has none
	argv    [][]*regexp.Regexp
}

func (r *Route) compileSSH() (*compiledSSH, error) {
	s := r.SSH
	if len(s.Users) == 0 || len(s.Commands) == 0 {
		return nil, errors.New("an ssh route names at least one user and one command")
	}
	for _, u := range s.Users {
		if !IsSSHUser(u) {
			return nil, errors.New("a user name is not usable")
		}
	}
	sources := 0
	for _, on := range []bool{s.Key != "", s.Agent != ""} {
		if on {
			sources++
		}
	}
	switch {
	case sources != 1:
		return nil, errors.New("an ssh route has a key or an agent, one of them")
	case s.Agent != "" && s.AgentKey == "":
		return nil, errors.New("an agent needs the fingerprint of the key")
	case len(s.KnownHosts) == 0 && len(s.Pins) == 0:
		return nil, errors.New("an ssh route needs known hosts or pins")
	case len(r.Match.Methods) > 0 || len(r.Match.Paths) > 0 || len(r.Inject) > 0:
		return nil, errors.New("an ssh route has no methods, paths or injected fields")
	case s.Sessions < 0 || s.Keepalive < 0:
		return nil, errors.New("a limit is negative")
	}
	if j := s.Jump; j != nil {
		if h, err := ParseHost(bracketed(j.Host)); err != nil || h != j.Host || j.Port < 1 || j.Port > 65535 || !IsSSHUser(j.User) || j.Key == "" {
			return nil, errors.New("a jump host needs a host, a port, a user and a key")
		}
	}
	for _, e := range s.Env {
		if !IsEnvPattern(e) {
			return nil, errors.New("a variable's name is not usable")
		}
	}
	c := &compiledSSH{}
	for i := range s.Commands {
		cmd := &s.Commands[i]
		re, argv, err := cmd.compile()
		if err != nil {
			return nil, fmt.Errorf("command %d: %w", i, err)
		}
		c.regexps, c.argv = append(c.regexps, re), append(c.argv, argv)
	}
	return c, nil
}

// CheckCommand reports what is wrong with a command pattern.
func CheckCommand(c *Command) error {
	_, _, err := c.compile()
	return err
}

func (c *Command) compile() (re *regexp.Regexp, argv []*regexp.Regexp, err error) {
	forms := 0
	for _, on := range []bool{c.Exact != "", len(c.Argv) > 0, c.Regexp != ""} {
		if on {
			forms++
		}
	}
	if forms != 1 {
		return nil, nil, errors.New("it has exactly one of exact, argv and regexp")
	}
	if c.Grace < 0 {
		return nil, nil, errors.New("its grace is negative")
	}
	if v := c.Reconcile; v != nil {
		if v.Command == "" || v.CommittedWhen == nil && v.RejectedWhen == nil {
			return nil, nil, errors.New("a confirming command needs a command and a rule")
		}
		if v.RejectedWhen != nil && v.VisibleAfter <= 0 {
			return nil, nil, errors.New("a rule that rejects needs the longest time until an effect shows (visible_after)")
		}
		if min(v.VisibleAfter, v.Every, v.MaxEvery) < 0 || v.Tries < 0 {
			return nil, nil, errors.New("a limit of the confirming command is negative")
		}
		for _, verdict := range []*Verdict{v.CommittedWhen, v.RejectedWhen} {
			if verdict == nil {
				continue
			}
			if len(verdict.ExitStatus) == 0 && verdict.Stdout == "" {
				return nil, nil, errors.New("a rule of a confirming command takes everything")
			}
			if _, err := regexp.Compile(verdict.Stdout); err != nil {
				return nil, nil, errors.New("a rule's expression is malformed")
			}
		}
	}
	if c.Regexp != "" {
		re, err = regexp.Compile(`\A(?:` + c.Regexp + `)\z`)
		if err != nil {
			return nil, nil, errors.New("the expression is malformed")
		}
		if err := c.checkGroups(re.NumSubexp()); err != nil {
			return nil, nil, err
		}
		return re, nil, nil
	}
	if err := c.checkGroups(0); err != nil {
		return nil, nil, err
	}
	for i, p := range c.Argv {
		if p == "..." && i == len(c.Argv)-1 && i > 0 {
			argv = append(argv, nil)
			break
		}
		if p == "" && i == 0 {
			return nil, nil, errors.New("the first word is empty")
		}
		argv = append(argv, wordPattern(p))
	}
	return nil, argv, nil
}

// checkGroups reports a confirming command that names a group that is not there.
func (c *Command) checkGroups(groups int) error {
	if c.Reconcile == nil {
		return nil
	}
	for _, v := range confirmVariable.FindAllStringSubmatch(c.Reconcile.Command, -1) {
		if n, err := strconv.Atoi(v[1]); err == nil && n > groups {
			return fmt.Errorf("its confirming command names %s, and the pattern has no such group", v[0])
		}
	}
	return nil
}

// wordPattern compiles a pattern of one word.
func wordPattern(p string) *regexp.Regexp {
	var b strings.Builder
	b.WriteString(`(?s)\A`)
	for i := 0; i < len(p); {
		switch {
		case strings.HasPrefix(p[i:], "**"):
			b.WriteString(`.*`)
			i += 2
		case p[i] == '*':
			b.WriteString(`[^/]*`)
			i++
		case p[i] == '?':
			b.WriteString(`[^/]`)
			i++
		default:
			j := i
			for j < len(p) && p[j] != '*' && p[j] != '?' {
				j++
			}
			b.WriteString(regexp.QuoteMeta(p[i:j]))
			i = j
		}
	}
	b.WriteString(`\z`)
	return regexp.MustCompile(b.String())
}

// takesWord reports whether the pattern p, compiled as re, takes the word w. Words
// that a program would read as an option, or that lead out of a folder, are taken
// only where the pattern writes them (CONTRACT V1).
func takesWord(p string, re *regexp.Regexp, w string) bool {
	if !re.MatchString(w) {
		return false
	}
	if !strings.ContainsAny(p, "*?") {
		return true
	}
	if strings.HasPrefix(w, "-") && !strings.HasPrefix(p, "-") {
		return false
	}
	return !slices.Contains(strings.Split(w, "/"), "..")
}

// take reports whether the command is one of the pattern's. argv is what the command
// line means if it holds plain words only, else nil.
func (c *Command) take(re *regexp.Regexp, patterns []*regexp.Regexp, command string, argv []string) (captures []string, ok bool) {
	switch {
	case c.Exact != "":
		return nil, c.Exact == command
	case re != nil:
		m := re.FindStringSubmatch(command)
		return m, m != nil
	case argv == nil:
		return nil, false
	}
	for i, p := range patterns {
		if p == nil {
			return nil, true // "..."
		}
		if i >= len(argv) || !takesWord(c.Argv[i], p, argv[i]) {
			return nil, false
		}
	}
	return nil, len(argv) == len(patterns)
}

// MatchSSH returns the first SSH route in file order that takes the command line for
// that user at the target, or nil and the reason. Routes are walked in order, within
// one the commands: there is no way around the first rule that takes a command.
func (s *Snapshot) MatchSSH(t Target, user, command string) (*Route, *CommandMatch, Miss) {
	argv, plain := SplitCommand(command)
	if !plain {
		argv = nil
	}
	miss := Miss{Kind: MissHost}
	rank := map[MissKind]int{MissHost: 0, MissPort: 1, MissUser: 2, MissCommand: 3}
	near := func(k MissKind, c *compiled) {
		if rank[k] > rank[miss.Kind] {
			miss = Miss{Kind: k, Nearest: &c.Route}
		}
	}
	for _, c := range s.ssh {
		switch {
		case !c.takesHost(t.Host):
			continue
		case !c.takesSSHPort(t.Port):
			near(MissPort, c)
			continue
		case !slices.Contains(c.SSH.Users, user):
			near(MissUser, c)
			continue
		}
		for i := range c.SSH.Commands {
			rule := &c.SSH.Commands[i]
			if captures, ok := rule.take(c.compiledSSH.regexps[i], c.compiledSSH.argv[i], command, argv); ok {
				return &c.Route, &CommandMatch{Rule: rule, Index: i, Captures: captures}, Miss{}
			}
		}
		near(MissCommand, c)
	}
	return nil, nil, miss
}

// HasSSH reports whether a route is for SSH.
func (s *Snapshot) HasSSH() bool { return len(s.ssh) > 0 }

func (r *Route) takesSSHPort(port int) bool {
	if len(r.Match.Ports) == 0 {
		return port == DefaultSSHPort
	}
	return slices.Contains(r.Match.Ports, port)
}

// AllowsEnv reports whether a caller may set the variable. Names that begin with
// WAYBILL_ are Waybill's and only ever set by it.
func (s *SSH) AllowsEnv(name string) bool {
	return !strings.HasPrefix(name, "WAYBILL_") && s.namesEnv(name)
}

// MarksAction reports whether commands get the action's id in WAYBILL_ACTION_ID
// (CONTRACT K7): where the list of variables names it.
func (s *SSH) MarksAction() bool { return slices.Contains(s.Env, EnvActionID) }

// EnvActionID is the variable that carries the action's id.
const EnvActionID = "WAYBILL_ACTION_ID"

func (s *SSH) namesEnv(name string) bool {
	for _, p := range s.Env {
		if prefix, wild := strings.CutSuffix(p, "*"); p == name || wild && strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// IsEnvPattern reports whether s is a variable's name, or the beginning of one and "*".
func IsEnvPattern(s string) bool {
	name := strings.TrimSuffix(s, "*")
	return IsEnvName(name)
}

// IsEnvName reports whether s is a portable name of an environment variable.
func IsEnvName(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c == '_' || i > 0 && '0' <= c && c <= '9') {
			return false
		}
	}
	return s != "" && len(s) <= 256
}

// IsSSHUser reports whether s can be the name of a remote user: printable ASCII
// without space, quotes and "@", and no option.
func IsSSHUser(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] <= ' ' || s[i] > '~' || strings.IndexByte("\"'`@:;|&<>$\\", s[i]) >= 0 {
			return false
		}
	}
	return s != "" && s[0] != '-' && len(s) <= 128
}

// MaxCommandBytes bounds a command line.
const MaxCommandBytes = 128 << 10

// QuoteWord quotes a word for a POSIX shell.
func QuoteWord(w string) string {
	if w != "" && strings.IndexFunc(w, func(r rune) bool { return !plainRune(r) }) < 0 {
		return w
	}
	return "'" + strings.ReplaceAll(w, "'", `'\''`) + "'"
}

// JoinCommand makes the command line whose words are argv.
func JoinCommand(argv []string) string {
	words := make([]string, len(argv))
	for i, w := range argv {
		words[i] = QuoteWord(w)
		if i == 0 && strings.ContainsRune(w, '=') {
			words[i] = "'" + strings.ReplaceAll(w, "'", `'\''`) + "'" // no assignment
		}
	}
	return strings.Join(words, " ")
}

// plainRune reports whether a character means itself to every shell that people have,
// wherever it stands.
func plainRune(r rune) bool {
	return 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || strings.ContainsRune("_-./,:@+%=", r)
}

// SplitCommand reads a command line as a POSIX shell would, if it holds nothing but
// plain words: no operator, expansion, pattern, assignment, comment or line break, so
// that what was matched is what runs. Otherwise ok is false.
func SplitCommand(s string) (argv []string, ok bool) {
	if s == "" || len(s) > MaxCommandBytes {
		return nil, false
	}
	var word strings.Builder
	in := false
	quoted := false
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == ' ' || c == '\t':
			if in {
				argv = append(argv, word.String())
				word.Reset()
				in, quoted = false, false
			}
			i++
		case c == '\'':
			end := strings.IndexByte(s[i+1:], '\'')
			if end < 0 || !printableText(s[i+1:i+1+end]) {
				return nil, false
			}
			word.WriteString(s[i+1 : i+1+end])
			in, quoted = true, true
			i += end + 2
		case c == '"':
			end := strings.IndexByte(s[i+1:], '"')
			// A backslash, dollar, back quote or "!" inside may mean something.
			if end < 0 || strings.ContainsAny(s[i+1:i+1+end], "\\$`!") || !printableText(s[i+1:i+1+end]) {
				return nil, false
			}
			word.WriteString(s[i+1 : i+1+end])
			in, quoted = true, true
			i += end + 2
		case c == '\\':
			if i+1 >= len(s) || s[i+1] <= ' ' || s[i+1] > '~' {
				return nil, false
			}
			word.WriteByte(s[i+1])
			in, quoted = true, true
			i += 2
		case plainRune(rune(c)):
			if c == '=' && len(argv) == 0 && !quoted {
				return nil, false // an assignment, or what another shell takes for one
			}
			if c == '=' && !in {
				return nil, false // zsh: the path of a command
			}
			word.WriteByte(c)
			in = true
			i++
		default:
			return nil, false
		}
	}
	if in {
		argv = append(argv, word.String())
	}
	return argv, len(argv) > 0 && argv[0] != ""
}

// printableText reports whether a quoted text holds no control character.
func printableText(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < ' ' || s[i] == 0x7f {
			return false
		}
	}
	return true
}

// Judge maps the complete result of a confirming command: +1 committed, -1 rejected, 0
// still unknown. A result that both rules take says nothing.
func (c *Confirm) Judge(exitStatus int, stdout []byte) int {
	committed, rejected := c.CommittedWhen.takes(exitStatus, stdout), c.RejectedWhen.takes(exitStatus, stdout)
	switch {
	case committed == rejected:
		return 0
	case committed:
		return 1
	default:
		return -1
	}
}

func (v *Verdict) takes(exitStatus int, stdout []byte) bool {
	if v == nil || len(v.ExitStatus) > 0 && !slices.Contains(v.ExitStatus, exitStatus) {
		return false
	}
	if v.Stdout == "" {
		return len(v.ExitStatus) > 0
	}
	if len(v.ExitStatus) == 0 && exitStatus > 125 {
		return false // the shell could not run it, or it died: its output says nothing
	}
	re, err := regexp.Compile(v.Stdout)
	return err == nil && re.Match(stdout)
}

// clone copies everything the block points to.
func (s *SSH) clone() *SSH {
	if s == nil {
		return nil
	}
	c := *s
	c.Users, c.Pins, c.Env, c.KnownHosts = cloneSlice(s.Users), cloneSlice(s.Pins), cloneSlice(s.Env), cloneSlice(s.KnownHosts)
	c.Commands = cloneSlice(s.Commands)
	for i := range c.Commands {
		c.Commands[i].Argv = cloneSlice(c.Commands[i].Argv)
		if v := c.Commands[i].Reconcile; v != nil {
			w := *v
			for _, p := range []**Verdict{&w.CommittedWhen, &w.RejectedWhen} {
				if *p != nil {
					q := **p
					q.ExitStatus = cloneSlice(q.ExitStatus)
					*p = &q
				}
			}
			c.Commands[i].Reconcile = &w
		}
	}
	if s.Jump != nil {
		j := *s.Jump
		c.Jump = &j
	}
	return &c
}
