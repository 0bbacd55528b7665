package contract

import (
	"bufio"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"waybill/docs"
)

// CodeRow is one row of the table in section U of docs/contract.md, cells as they
// stand there, without back-quotes around the code.
type CodeRow struct {
	Code       string
	Note       string // what stands beside the code in its cell
	Phase      string
	Outcome    string
	Retry      string
	HTTP       string
	ProxyError string
}

var codeCell = regexp.MustCompile("`([A-Z][A-Z_]+)`")

// CodeTable returns the rows of section U; a row that names two codes becomes two.
// The package that owns the codes tests itself against it.
func CodeTable() ([]CodeRow, error) { return parseCodes(docs.Contract) }

func parseCodes(text string) ([]CodeRow, error) {
	_, section, ok := strings.Cut(text, "\n## U. ")
	if !ok {
		return nil, errors.New("docs/contract.md: no section U")
	}
	if head, _, more := strings.Cut(section, "\n## "); more {
		section = head
	}
	var out []CodeRow
	seen := map[string]bool{}
	sc := bufio.NewScanner(strings.NewReader(section))
	for sc.Scan() {
		line := sc.Text()
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if len(cells) != 6 {
			return nil, fmt.Errorf("docs/contract.md: section U: %d cells in %q", len(cells), line)
		}
		// Codes stand before the first parenthesis; inside it other codes may be mentioned.
		head, note, _ := strings.Cut(cells[0], "(")
		codes := codeCell.FindAllStringSubmatch(head, -1)
		if len(codes) == 0 {
			return nil, fmt.Errorf("docs/contract.md: section U: no code in %q", line)
		}
		for _, m := range codes {
			if seen[m[1]] {
				return nil, fmt.Errorf("docs/contract.md: section U: %s stands twice", m[1])
			}
			seen[m[1]] = true
			out = append(out, CodeRow{
				Code: m[1], Note: strings.TrimSuffix(note, ")"),
				Phase: cells[1], Outcome: cells[2], Retry: cells[3], HTTP: cells[4], ProxyError: cells[5],
			})
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("docs/contract.md: section U: %w", err)
	}
	if len(out) == 0 {
		return nil, errors.New("docs/contract.md: section U has no row")
	}
	return out, nil
}
