package contract

import (
	"strings"
	"testing"
)

func TestTheDocumentsParse(t *testing.T) {
	rules, err := Rules()
	if err != nil {
		t.Fatal(err)
	}
	// The smallest and the largest number of some groups, so that a parser that loses
	// rules cannot agree with itself.
	for _, n := range []string{"A1", "A11", "B4", "C5", "D5", "E8", "F10", "G13", "H10", "I10", "J5", "K7", "L9", "M7", "N5", "O5", "R4", "S2", "V7", "T5"} {
		if _, ok := Lookup(n); !ok {
			t.Errorf("rule %s was not found", n)
		}
	}
	if len(rules) < 129 {
		t.Errorf("%d rules; the contract never loses one", len(rules))
	}
	if r, _ := Lookup("L1"); !strings.Contains(r.Text, `"dispatch_started":true`) || r.Title != "The envelope" {
		t.Errorf("L1 lost its example: %+v", r)
	}
	if r, _ := Lookup("L2"); strings.Contains(r.Text, "Evidence says") {
		t.Errorf("L2 took its neighbour's text: %q", r.Text)
	}
	if _, err := Unbuilt(); err != nil {
		t.Error(err)
	}
}

func TestParseRulesRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":            "# title\n",
		"a gap":              "## A. T\n- **A1** x\n- **A3** x\n",
		"a repetition":       "## A. T\n- **A1** x\n- **A1** x\n",
		"another group":      "## A. T\n- **B1** x\n",
		"no group":           "- **A1** x\n",
		"a leading zero":     "## A. T\n- **A01** x\n",
		"a group twice":      "## A. T\n- **A1** x\n## A. T\n- **A1** x\n",
		"no text":            "## A. T\n- **A1**\n",
		"not a list item":    "## A. T\n- **A1** x\n**A2** x\n",
		"a starred item":     "## A. T\n- **A1** x\n* **A2** x\n",
		"an indented item":   "## A. T\n- **A1** x\n  - **A2** x\n",
		"a lower-case item":  "## A. T\n- **A1** x\n- **a2** x\n",
		"two letters":        "## A. T\n- **A1** x\n- **AB2** x\n",
		"starts at two":      "## A. T\n- **A2** x\n",
		"restarts at number": "## A. T\n- **A1** x\n- **A0** x\n",
	} {
		if rules, err := parseRules(text); err == nil {
			t.Errorf("%s: accepted as %+v", name, rules)
		}
	}
}

func TestParseUnbuiltRefuses(t *testing.T) {
	rules, err := parseRules("## A. T\n- **A1** x\n- **A2** x\n## B. T\n- **B1** x\n")
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseUnbuilt("# comment\n\nA2   some work\nB1 other work\n", rules)
	if err != nil || len(got) != 2 || got["A2"] != "some work" {
		t.Fatalf("%v %v", got, err)
	}
	_, err = parseUnbuilt("A3 x\nA1\nA1 x\nB1 x\nA2 x\n", rules)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, part := range []string{`:1: "A3" is no rule`, ":2: A1 names no subject", ":3: A1 stands twice", ":5: A2 stands after B1"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not say %q:\n%v", part, err)
		}
	}
}

func TestParseCodesRefuses(t *testing.T) {
	const head = "\n## U. Codes\n\n| code | phase | outcome | retry | HTTP | Proxy-Status error |\n| --- | --- | --- | --- | --- | --- |\n"
	rows, err := parseCodes(head + "| `A_B` / `CD` (see `D`) | p | o | r | 400 | e |\n")
	if err != nil || len(rows) != 2 || rows[0].Code != "A_B" || rows[1].Code != "CD" || rows[1].HTTP != "400" || rows[0].Note != "see `D`" {
		t.Fatalf("%+v %v", rows, err)
	}
	for name, text := range map[string]string{
		"no section":     "## T. x\n",
		"no row":         head,
		"a missing cell": head + "| `AA` | p | o | r | 400 |\n",
		"a code twice":   head + "| `AA` | p | o | r | 400 | e |\n| `AA` | p | o | r | 400 | e |\n",
		"no code":        head + "| `aa` | p | o | r | 400 | e |\n",
	} {
		if rows, err := parseCodes(text); err == nil {
			t.Errorf("%s: accepted as %+v", name, rows)
		}
	}
}
