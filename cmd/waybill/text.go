package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"waybill/outcome"
)

// printable makes text that came from a caller or an upstream safe for a
// terminal: control characters and invalid UTF-8 become "?".
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// dash stands for an empty column.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return printable(s)
}

// styler colours words, or leaves them alone.
type styler bool

// newStyler colours only on a terminal, and not when NO_COLOR is set.
func newStyler(a *app, w io.Writer) styler {
	if a.getenv("NO_COLOR") != "" || a.getenv("TERM") == "dumb" {
		return false
	}
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return styler(err == nil && st.Mode()&os.ModeCharDevice != 0)
}

const (
	red    = "31"
	green  = "32"
	yellow = "33"
	bold   = "1"
)

func (s styler) paint(code, text string) string {
	if !s || code == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// outcomeColour takes the wire form, as listings have it.
func outcomeColour(o string) string {
	switch o {
	case outcome.Committed.String():
		return green
	case outcome.Unknown.String():
		return red
	case outcome.Rejected.String():
		return yellow
	default:
		return ""
	}
}

// table prints aligned columns. Colours are applied after the padding, so that
// they do not count as width.
type table struct {
	head  []string
	rows  [][]string
	color func(row, column int) string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print(w io.Writer, s styler) error {
	width := make([]int, len(t.head))
	for i, h := range t.head {
		width[i] = utf8.RuneCountInString(h)
	}
	for _, r := range t.rows {
		for i, c := range r {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	line := func(cells []string, color func(column int) string) error {
		var b strings.Builder
		for i, c := range cells {
			pad := ""
			if i < len(cells)-1 {
				pad = strings.Repeat(" ", width[i]-utf8.RuneCountInString(c)+2)
			}
			b.WriteString(s.paint(color(i), c) + pad)
		}
		_, err := fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
		return err
	}
	if err := line(t.head, func(int) string { return bold }); err != nil {
		return err
	}
	for n, r := range t.rows {
		if err := line(r, func(i int) string {
			if t.color == nil {
				return ""
			}
			return t.color(n, i)
		}); err != nil {
			return err
		}
	}
	return nil
}
