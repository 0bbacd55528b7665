package proxy

import (
	"bytes"
	"errors"
	"net/http"
	"strconv"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// Fields of an answer that holds chunks of a result. Chunks are numbered from 1.
const (
	// fieldLastChunk is the number of the last chunk in the answer, or of the one asked
	// for when there is none after it.
	fieldLastChunk = "Waybill-Last-Chunk"
	// fieldResult says whether the last chunk ends a complete result: "complete", or
	// "incomplete" – of an answer that still arrives, or that broke off (CONTRACT H10).
	fieldResult = "Waybill-Result"
)

// chunksPerAnswer bounds one answer, and with it the memory that it takes.
const chunksPerAnswer = 16

// chunks answers with the chunks of a result after the given one, also while it
// arrives and after it broke off (CONTRACT H4). It is always 206: what it holds is a
// part, and nothing in it says that the whole is there but Waybill-Result.
func (a *api) chunks(rec dispatch.Record, text string) {
	after, err := strconv.ParseUint(text, 10, 31)
	if err != nil {
		a.fail(refusal(outcome.CodeInvalidRequest, "request.query.after_chunk", "bad_parameter", "Give the number of the last chunk you have; 0 for none."))
		return
	}
	if rec.Facts.Code == outcome.CodeResultContainsSecret {
		// Withheld, and so are the parts that were stored before the secret came (C5).
		a.noResult(&rec, dispatch.ErrNoResult)
		return
	}
	attempt, total := rec.ResultOf, -1
	if rec.Result != nil {
		total = rec.Result.Chunks
		if _, body, err := a.p.journal.OpenResult(a.r.Context(), rec.ID); err != nil {
			a.noResult(&rec, err) // dropped, or damaged
			return
		} else if err := body.Close(); err != nil {
			a.unreadable(rec.ID.String(), err)
			return
		}
	} else if d := rec.Deciding(); d != nil {
		attempt = d.N
	}
	next := int(after)
	if total >= 0 && next > total {
		// It would be told "complete" of something it does not have.
		a.fail(refusal(outcome.CodeInvalidRequest, "request.query.after_chunk", "bad_parameter", "The result has fewer chunks."))
		return
	}
	var body bytes.Buffer
	for n := 0; n < chunksPerAnswer && (total < 0 || next < total); n++ {
		data, err := a.p.journal.Chunk(a.r.Context(), rec.ID, attempt, next)
		if errors.Is(err, dispatch.ErrNoResult) && total < 0 {
			break
		}
		if err != nil {
			a.unreadable(rec.ID.String(), err)
			return
		}
		body.Write(data)
		next++
	}
	if next == int(after) && total < 0 {
		// Nothing more, and no complete result: the envelope says what is known (H10).
		if !rec.Ended {
			f := rec.Shown()
			env := outcome.NewEnvelope(rec.ID.String(), f, "", rec.Evidence())
			a.envelope(&env, time.Second)
			return
		}
		a.noResult(&rec, dispatch.ErrNoResult)
		return
	}
	h := a.w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Length", strconv.Itoa(body.Len()))
	h.Set(outcome.HeaderInvocation, rec.ID.String())
	h.Set(outcome.HeaderOutcome, outcome.FormatOutcome(rec.Shown()))
	h.Set(fieldLastChunk, strconv.Itoa(next))
	state := "incomplete"
	if total >= 0 && next >= total {
		state = "complete"
	}
	h.Set(fieldResult, state)
	Inert(h)
	a.private()
	a.w.WriteHeader(http.StatusPartialContent)
	if a.r.Method != http.MethodHead {
		_, _ = a.w.Write(body.Bytes())
	}
}
