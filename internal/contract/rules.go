package contract

import (
	"bufio"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"waybill/docs"
)

// Rule is one numbered rule of docs/contract.md.
type Rule struct {
	Number string // "F10"
	Group  string // "F"
	Title  string // of the group
	Text   string // as it stands, lines joined by \n, without the number
}

// Rules returns the rules in the order of docs/contract.md. The error says what is
// wrong with that file. The result is shared: do not change it.
func Rules() ([]Rule, error) { return parsedRules() }

var parsedRules = sync.OnceValues(func() ([]Rule, error) { return parseRules(docs.Contract) })

// Lookup returns the rule with that number.
func Lookup(number string) (Rule, bool) {
	r, ok := rulesByNumber()[number]
	return r, ok
}

var rulesByNumber = sync.OnceValue(func() map[string]Rule {
	rules, err := Rules()
	if err != nil {
		return nil
	}
	m := make(map[string]Rule, len(rules))
	for _, r := range rules {
		m[r.Number] = r
	}
	return m
})

// Unbuilt returns the rules of docs/contract-unbuilt.txt and, for each, the subject
// of the work that will build it.
func Unbuilt() (map[string]string, error) {
	rules, err := Rules()
	if err != nil {
		return nil, err
	}
	return parseUnbuilt(docs.ContractUnbuilt, rules)
}

// BuiltGroups returns the letters of the groups that have at least one built rule,
// in the order of the document.
func BuiltGroups() ([]string, error) {
	rules, err := Rules()
	if err != nil {
		return nil, err
	}
	unbuilt, err := Unbuilt()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, r := range rules {
		if _, later := unbuilt[r.Number]; later {
			continue
		}
		if len(out) == 0 || out[len(out)-1] != r.Group {
			out = append(out, r.Group)
		}
	}
	return out, nil
}

var (
	groupLine = regexp.MustCompile(`^## ([A-Z])\. (\S.*)$`)
	ruleLine  = regexp.MustCompile(`^- \*\*([A-Z])([0-9]+)\*\* (\S.*)$`)
	// boldNumber finds what looks like the head of a rule but is not written as one,
	// so that a typing slip cannot make a rule invisible.
	boldNumber = regexp.MustCompile(`^\s*[-*]?\s*\*\*[A-Za-z]+[0-9]+\*\*`)
)

// parseRules reads the text of contract.md. Groups are single letters, rules are
// numbered from 1 in each without a gap; anything else is an error with its line.
func parseRules(text string) ([]Rule, error) {
	var (
		out    []Rule
		group  string
		title  string
		last   int
		open   bool // lines go on belonging to the last rule
		groups = map[string]bool{}
	)
	sc := bufio.NewScanner(strings.NewReader(text))
	sc.Buffer(nil, 1<<20)
	for n := 1; sc.Scan(); n++ {
		line := sc.Text()
		if m := groupLine.FindStringSubmatch(line); m != nil {
			if groups[m[1]] {
				return nil, fmt.Errorf("docs/contract.md:%d: group %s stands twice", n, m[1])
			}
			groups[m[1]] = true
			group, title, last, open = m[1], m[2], 0, false
			continue
		}
		if m := ruleLine.FindStringSubmatch(line); m != nil {
			num, err := strconv.Atoi(m[2])
			switch {
			case err != nil || strconv.Itoa(num) != m[2]:
				return nil, fmt.Errorf("docs/contract.md:%d: %s%s is not a plain number", n, m[1], m[2])
			case m[1] != group:
				return nil, fmt.Errorf("docs/contract.md:%d: rule %s%s stands in group %q", n, m[1], m[2], group)
			case num != last+1:
				return nil, fmt.Errorf("docs/contract.md:%d: rule %s%d follows %s%d", n, group, num, group, last)
			}
			last, open = num, true
			out = append(out, Rule{Number: m[1] + m[2], Group: group, Title: title, Text: m[3]})
			continue
		}
		switch {
		case boldNumber.MatchString(line):
			return nil, fmt.Errorf("docs/contract.md:%d: a rule must begin with \"- **X1** text\"", n)
		case line == "" || strings.HasPrefix(line, "  "):
			if open {
				out[len(out)-1].Text += "\n" + strings.TrimPrefix(line, "  ")
			}
		default:
			open = false
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("docs/contract.md: %w", err)
	}
	if len(out) == 0 {
		return nil, errors.New("docs/contract.md: no rule")
	}
	for i := range out {
		out[i].Text = strings.TrimRight(out[i].Text, "\n")
	}
	return out, nil
}

// parseUnbuilt reads the text of contract-unbuilt.txt: "RULE subject" lines, empty
// lines and # comments. A line without a subject, an unknown rule, a rule out of
// order or twice is an error; all errors are returned together.
func parseUnbuilt(text string, rules []Rule) (map[string]string, error) {
	order := make(map[string]int, len(rules)) // by letter, then by number (the document has V before T)
	for _, r := range rules {
		num, _ := strconv.Atoi(r.Number[1:])
		order[r.Number] = int(r.Group[0])*1000 + num
	}
	out := map[string]string{}
	var errs []error
	prev := ""
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		rule, subject, _ := strings.Cut(line, " ")
		subject = strings.TrimSpace(subject)
		fail := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("docs/contract-unbuilt.txt:%d: "+format, append([]any{i + 1}, args...)...))
		}
		if _, ok := order[rule]; !ok {
			fail("%q is no rule of docs/contract.md", rule)
			continue
		}
		if _, twice := out[rule]; twice {
			fail("%s stands twice", rule)
			continue
		}
		if subject == "" {
			fail("%s names no subject", rule)
		}
		if prev != "" && order[rule] < order[prev] {
			fail("%s stands after %s", rule, prev)
		}
		prev, out[rule] = rule, subject
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return out, nil
}
