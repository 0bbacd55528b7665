package dispatch

import (
	"context"
	"encoding/xml"
	"net/http"
	"strconv"
	"strings"

	"waybill/dispatch/leak"
	"waybill/outcome"
	"waybill/routes"
)

// whole is the body as it is stored, where it is small; false for one that is not, or
// cannot be read back.
func (s *resultSink) whole() ([]byte, bool) {
	if s.total > maxAnswer {
		return nil, false
	}
	var out []byte
	for i := range s.stored {
		b, err := s.a.p.cfg.Journal.Chunk(context.Background(), s.a.id, s.a.tries, i)
		if err != nil {
			return nil, false
		}
		out = append(out, b...)
	}
	return decoded(s.header, append(out, s.buf.Bytes()...))
}

// decoded is a whole body without its codings, for whoever reads what it says. It is as
// clean as the body: what is encoded is searched decoded, and not stored with a secret (C5).
func decoded(h http.Header, body []byte) ([]byte, bool) {
	list, _ := leak.ContentEncoding(h)
	out, err := leak.Decode(list, body, maxAnswer)
	return out, err == nil
}

// resolveItems reads the outcome of each item of a batch from a complete answer (CONTRACT
// F7). What it does not mention, or does not say clearly, stays unknown.
func (a *action) resolveItems(end *Ending, sink *resultSink, facts outcome.Facts) {
	c := a.route.Contract.Batch
	if c == nil || a.recall == nil || a.recall.Items == nil || a.recall.Items.Untracked != "" || a.recall.Items.Atomic ||
		facts.Outcome != outcome.Committed || facts.Code != outcome.CodeNone {
		return
	}
	raw, ok := sink.whole()
	if !ok {
		return
	}
	var list []Item
	if c.Multistatus {
		list = a.fromMultistatus(raw, end.Status)
	} else {
		list = a.fromResults(c, raw)
	}
	if len(list) > 0 {
		a.add(Event{Type: ItemsResolved, Attempt: a.tries, Items: &Items{List: list}})
	}
}

// said is what an answer says of one item.
type said struct {
	id     string
	status int
	facts  outcome.Facts
}

func (a *action) fromResults(c *routes.Batch, raw []byte) []Item {
	var results []any
	if c.ResultLines {
		lines, ok := jsonLines(raw)
		if !ok {
			return nil
		}
		results = lines
	} else {
		doc := routes.ParseDocument(raw)
		p, err := routes.ParseJSONPath(c.Results)
		if err != nil || !doc.OK {
			return nil
		}
		array, ok := first(p.Find(doc.Value)).([]any)
		if !ok {
			return nil
		}
		results = array
	}
	list := make([]said, len(results))
	for i, r := range results {
		doc := routes.Document{Value: r, OK: true}
		if c.ResultID != "" {
			list[i].id, _ = jsonText(doc, c.ResultID)
		}
		if c.Status != "" {
			if text, ok := jsonText(doc, c.Status); ok {
				list[i].status, _ = strconv.Atoi(text)
			}
		}
		list[i].facts = a.itemFacts(c, doc, list[i].status)
	}
	return a.match(list, c.ResultID != "")
}

// itemFacts reads one result. Facts that are unknown are left out by match.
func (a *action) itemFacts(c *routes.Batch, doc routes.Document, status int) outcome.Facts {
	unknown := unresolvedFacts(outcome.Reconcile)
	if len(c.CommittedWhen)+len(c.RejectedWhen) > 0 {
		committed, rejected := false, false
		for i := range c.CommittedWhen {
			committed = committed || c.CommittedWhen[i].HoldsFor(doc)
		}
		for i := range c.RejectedWhen {
			rejected = rejected || c.RejectedWhen[i].HoldsFor(doc)
		}
		switch {
		case committed == rejected:
			return unknown
		case committed:
			return resolutionFacts(outcome.Committed)
		default:
			return resolutionFacts(outcome.Rejected)
		}
	}
	return a.statusOfItem(status)
}

// statusOfItem reads a status that stands for one item, as if it were its own answer
// (G5). A 5xx does not say that nothing was done.
func (a *action) statusOfItem(status int) outcome.Facts {
	if status < 200 || status > 499 {
		return unresolvedFacts(outcome.Reconcile)
	}
	return statusFacts(status, &routes.Contract{RefusedBeforeExecution: a.route.Contract.RefusedBeforeExecution}, a.repeatable, false, outcome.Reconcile)
}

// match brings what was said to the items of the request: by id, else by place. Who is
// named twice, or was not asked for, is left out; results without ids count only when
// there are as many as items.
func (a *action) match(list []said, byID bool) []Item {
	items := a.recall.Items
	if !byID && len(list) != items.Count {
		return nil
	}
	index := make(map[string]int, len(items.IDs))
	for i, id := range items.IDs {
		index[id] = i
	}
	times := make(map[int]int)
	var out []Item
	for i, s := range list {
		at := i
		if byID {
			n, ok := index[s.id]
			if !ok && len(items.IDs) == 0 {
				// Items without ids are named by their place.
				k, err := strconv.Atoi(s.id)
				n, ok = k, err == nil && k >= 0 && k < items.Count
			}
			if !ok {
				continue
			}
			at = n
		}
		times[at]++
		if s.facts.Outcome == outcome.Committed && s.facts.Code == outcome.CodeNone || s.facts.Outcome == outcome.Rejected {
			out = append(out, Item{Index: at, Status: s.status, Facts: s.facts})
		}
	}
	kept := out[:0]
	for _, it := range out {
		if times[it.Index] == 1 {
			kept = append(kept, it)
		}
	}
	return kept
}

// multistatus is RFC 4918 §14.16.
type multistatus struct {
	XMLName   xml.Name `xml:"multistatus"`
	Responses []struct {
		Hrefs    []string `xml:"href"`
		Status   string   `xml:"status"`
		Propstat []struct {
			Status string `xml:"status"`
		} `xml:"propstat"`
	} `xml:"response"`
}

func (a *action) fromMultistatus(raw []byte, status int) []Item {
	var m multistatus
	if status != http.StatusMultiStatus || xml.Unmarshal(raw, &m) != nil {
		return nil
	}
	var list []said
	for _, r := range m.Responses {
		line := r.Status
		if line == "" && len(r.Propstat) == 1 {
			line = r.Propstat[0].Status
		}
		f := strings.Fields(line)
		code := 0
		if len(f) >= 2 {
			code, _ = strconv.Atoi(f[1])
		}
		for _, href := range r.Hrefs {
			list = append(list, said{id: strings.TrimSpace(href), status: code, facts: a.statusOfItem(code)})
		}
		if len(r.Hrefs) == 0 {
			list = append(list, said{status: code, facts: a.statusOfItem(code)})
		}
	}
	return a.match(list, len(a.recall.Items.IDs) > 0)
}
