package main

import (
	"context"
	"errors"
	"iter"

	"waybill/dispatch"
)

// reader is what the reading commands need. It is the running proxy, asked over
// the admin socket, or the journal itself when none runs.
type reader interface {
	// Actions iterates newest first.
	Actions(ctx context.Context, f dispatch.Filter) iter.Seq2[dispatch.ActionView, error]
	// Action returns an error with exitNotFound for an id that nobody knows.
	Action(ctx context.Context, id dispatch.ActionID) (actionDocument, error)
	// Events returns them in order of sequence.
	Events(ctx context.Context, id dispatch.ActionID) ([]dispatch.ShownEvent, error)
	// Sessions returns an errListIncomplete with what there is of a journal in quarantine.
	Sessions(ctx context.Context, q dispatch.SessionQuery) ([]dispatch.SessionView, error)
	// Result returns a *noResultError when there is no complete result. Its body
	// fails with an error, never with a clean short end.
	Result(ctx context.Context, id dispatch.ActionID) (*storedResult, error)
	Close() error
}

// openReader asks the running proxy, or opens the journal when none runs.
func openReader(ctx context.Context, a *app) (reader, error) {
	data, err := a.dataDir()
	if err != nil {
		return nil, err
	}
	client, err := a.running(ctx, data)
	if err == nil {
		return client, nil
	}
	if !errors.Is(err, errNotRunning) {
		return nil, err
	}
	return openJournalReader(ctx, a, data)
}

// running connects to the proxy of a data folder, or returns errNotRunning.
func (a *app) running(ctx context.Context, data string) (*adminClient, error) {
	path, err := a.adminPath(data, a.configuredAdmin())
	if err != nil {
		return nil, err
	}
	return dialAdmin(ctx, path)
}

// withReader opens a reader, gives it to f and closes it.
func withReader(ctx context.Context, a *app, f func(reader) error) (err error) {
	r, err := openReader(ctx, a)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := r.Close(); err == nil && cerr != nil {
			err = fail(exitFailure, "closing the journal: %w", cerr)
		}
	}()
	return f(r)
}

func parseID(s string) (dispatch.ActionID, error) {
	id, err := dispatch.ParseActionID(s)
	if err != nil {
		return id, fail(exitUsage, "%q: %w; \"waybill actions\" lists them", s, err)
	}
	return id, nil
}
