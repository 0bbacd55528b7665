package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"os"
	"path/filepath"

	"waybill/dispatch"
	"waybill/journal"
	"waybill/outcome"
	"waybill/proxy"
)

// journalReader reads the journal itself, while no proxy runs. Open actions are
// shown as the next start will record them; nothing is written.
type journalReader struct {
	j *journal.Journal
}

// openJournalReader opens the journal of a data folder for reading.
func openJournalReader(_ context.Context, _ *app, data string) (reader, error) {
	j, err := openForReading(data)
	if err != nil {
		return nil, err
	}
	return &journalReader{j}, nil
}

// hasJournal keeps reading commands from making a journal where there is none.
func hasJournal(data string) error {
	if _, err := os.Stat(filepath.Join(data, "journal")); err != nil {
		return fail(exitUnavailable, "no proxy runs, and there is no journal in %s; give --data FOLDER, or start one with \"waybill serve\"", data)
	}
	return nil
}

func openForReading(data string) (*journal.Journal, error) {
	if err := hasJournal(data); err != nil {
		return nil, err
	}
	// Reading needs no promise of the file system.
	j, _, err := journal.Open(journal.Options{Dir: filepath.Join(data, "journal"), ReadOnly: true, AllowAnyFilesystem: true})
	if err != nil {
		return nil, journalError(data, err)
	}
	return j, nil
}

// journalError tells the ways apart in which a journal cannot be opened.
func journalError(data string, err error) error {
	switch {
	case errors.Is(err, journal.ErrLocked):
		return fail(exitUnavailable, "data folder %s: %w; is a proxy running that does not answer?", data, err)
	case errors.Is(err, journal.ErrCorrupt):
		return fail(exitJournalDamaged, "data folder %s: %w; keep a copy before anything else, then: waybill journal verify", data, err)
	case errors.Is(err, journal.ErrFilesystem):
		return fail(exitConfig, "data folder %s: %w; choose --data on a local disk (ext4, XFS), or --%s to try things out", data, err, allowAnyFilesystem)
	case errors.Is(err, journal.ErrFormat), errors.Is(err, journal.ErrOldFormat), errors.Is(err, journal.ErrKey):
		return fail(exitConfig, "data folder %s: %w", data, err)
	case errors.Is(err, journal.ErrNoSpace):
		// A restart helps as soon as there is room: not a mistake of the configuration.
		return fail(exitUnavailable, "data folder %s: %w; make room on that file system", data, err)
	default:
		return fail(exitUnavailable, "data folder %s: %w", data, err)
	}
}

// Actions implements reader.
func (r *journalReader) Actions(ctx context.Context, f dispatch.Filter) iter.Seq2[dispatch.ActionView, error] {
	return func(yield func(dispatch.ActionView, error) bool) {
		for rec, err := range r.j.Actions(ctx, f) {
			if errors.Is(err, dispatch.ErrQuarantined) {
				err = errListIncomplete
			} else if err != nil {
				err = fail(exitFailure, "%w", err)
			}
			if err != nil {
				yield(dispatch.ActionView{}, err)
				return
			}
			if !yield(rec.View(), nil) {
				return
			}
		}
	}
}

func (r *journalReader) record(ctx context.Context, id dispatch.ActionID) (dispatch.Record, error) {
	rec, err := r.j.Action(ctx, id)
	switch {
	case errors.Is(err, dispatch.ErrActionNotFound):
		return rec, fail(exitNotFound, "%s: %s: no such action here; that is no permission to repeat it", outcome.CodeActionNotFound, id)
	case errors.Is(err, dispatch.ErrQuarantined):
		return rec, fail(exitJournalDamaged, "%s: the journal is behind its witness, so an action it does not know is unknown, not absent", id)
	case err != nil:
		return rec, fail(exitFailure, "%w", err)
	}
	return rec, nil
}

// Action implements reader.
func (r *journalReader) Action(ctx context.Context, id dispatch.ActionID) (actionDocument, error) {
	rec, err := r.record(ctx, id)
	if err != nil {
		return actionDocument{}, err
	}
	return actionDocument{Action: rec.View(), Envelope: rec.Envelope()}, nil
}

// Events implements reader.
func (r *journalReader) Events(ctx context.Context, id dispatch.ActionID) ([]dispatch.ShownEvent, error) {
	events, err := r.j.Events(ctx, id)
	if err != nil {
		return nil, fail(exitFailure, "%w", err)
	}
	return dispatch.ShowEvents(events), nil
}

// Result implements reader.
func (r *journalReader) Result(ctx context.Context, id dispatch.ActionID) (*storedResult, error) {
	rec, err := r.record(ctx, id)
	if err != nil {
		return nil, err
	}
	res, body, err := r.j.OpenResult(ctx, id)
	switch {
	case errors.Is(err, dispatch.ErrNoResult):
		return nil, &noResultError{rec.Envelope()}
	case errors.Is(err, dispatch.ErrResultDropped):
		f := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: rec.Facts.Outcome, Retry: outcome.Never, Code: outcome.CodeResultExpired}
		return nil, &noResultError{outcome.NewEnvelope(id.String(), f, "", rec.Evidence())}
	case err != nil:
		return nil, fail(exitFailure, "stored result: %w", err)
	}
	h := rec.ResultHeader(&res)
	proxy.Inert(h) // as the running proxy gives it out
	return &storedResult{Status: res.Status, Header: h, Body: body}, nil
}

// Close implements reader.
func (r *journalReader) Close() error { return r.j.Close() }

// Result implements reader.
func (c *adminClient) Result(ctx context.Context, id dispatch.ActionID) (*storedResult, error) {
	doc, err := c.Action(ctx, id)
	if err != nil {
		return nil, err
	}
	if doc.Action.Status == 0 {
		return nil, &noResultError{doc.Envelope}
	}
	resp, err := c.do(ctx, http.MethodGet, "/v1/actions/"+id.String()+"/result", nil, nil)
	if err != nil {
		return nil, err
	}
	// A stored result carries the action's own outcome; an upstream cannot write this
	// field (CONTRACT V6), so it tells the two apart.
	f, err := outcome.ParseOutcome(resp.Header.Get(outcome.HeaderOutcome))
	if err == nil && !isNoResult(f.Code) {
		return &storedResult{Status: resp.StatusCode, Header: resp.Header, Body: resp.Body}, nil
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminDocument))
	if err != nil {
		return nil, fail(exitUnavailable, "the proxy at %s stopped answering: %w", c.path, err)
	}
	var env outcome.Envelope
	if json.Unmarshal(data, &env) == nil && env.Error != nil {
		return nil, &noResultError{env}
	}
	return nil, adminError(resp.StatusCode, data)
}

func isNoResult(c outcome.Code) bool {
	return c == outcome.CodeResultPending || c == outcome.CodeResultExpired || c == outcome.CodeResultNotRetained || c == outcome.CodeActionNotFound
}
