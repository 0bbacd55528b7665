package inject

import (
	"context"
	"errors"
	"sync"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
)

// CacheOptions say how long what was fetched is used. The zero value has defaults.
type CacheOptions struct {
	// Timeout bounds one fetch; 0: 10 s. It is the cache's own: a caller that leaves
	// stops its wait and not the fetch.
	Timeout time.Duration
	// Refresh is how long a value is used that names no end; 0: for as long as the
	// definition stays the same.
	Refresh time.Duration
	// Margin ends a value so long before its Expires: clocks differ, and the request has
	// its way to go. 0: 10 s, but no more than a tenth of its life.
	Margin time.Duration
	// Done, if set, is told of the end of each fetch, in the goroutine of that fetch.
	Done func(ok bool)
	// Retry is how long a failure is answered without asking again; 0: 1 s.
	Retry time.Duration
	// Forget, if set, is called when the source is to drop what it derived (Cached.Forget);
	// it does not wait for a fetch that runs.
	Forget func()
}

// Cached is a source that asks another one as seldom as it may: one fetch at a time
// for everybody who waits, a renewal in the background once four fifths of the value's
// life are over, and never a value that has ended. It is safe for concurrent use.
type Cached struct {
	kind  string
	fetch func(ctx context.Context) (Material, error)
	o     CacheOptions

	mu     sync.Mutex
	cur    Material
	held   bool
	soft   time.Time // zero: never
	hard   time.Time // zero: never
	flight *flight
	doubt  time.Time // when a value was dropped because of a doubt
	failed error
	until  time.Time // the failure is answered until then
	age    int       // counts Forget: what a fetch brings that began before it is not held
}

type flight struct {
	done chan struct{}
	m    Material
	err  error
}

// NewCached returns a source of the kind that holds what fetch returns.
func NewCached(kind string, fetch func(ctx context.Context) (Material, error), o CacheOptions) *Cached {
	if o.Timeout <= 0 {
		o.Timeout = 10 * time.Second
	}
	if o.Retry <= 0 {
		o.Retry = time.Second
	}
	return &Cached{kind: kind, fetch: fetch, o: o}
}

// Kind implements Source.
func (c *Cached) Kind() string { return c.kind }

// Fetch implements Source.
func (c *Cached) Fetch(ctx context.Context) (Secret, error) {
	m, err := c.FetchRaw(ctx)
	if err != nil {
		return Secret{}, err
	}
	defer clear(m.Raw)
	return ParseSecret(m.Raw)
}

// FetchRaw implements RawSource.
func (c *Cached) FetchRaw(ctx context.Context) (Material, error) {
	c.mu.Lock()
	now := time.Now()
	if c.held && (c.hard.IsZero() || now.Before(c.hard) || control.Off("C1-no-stale-secret")) {
		if !c.soft.IsZero() && !now.Before(c.soft) && c.flight == nil && !now.Before(c.until) {
			c.start()
		}
		m := c.cur.clone()
		c.mu.Unlock()
		return m, nil
	}
	if c.failed != nil && c.flight == nil && now.Before(c.until) {
		err := c.failed
		c.mu.Unlock()
		return Material{}, err
	}
	f := c.flight
	if f == nil {
		f = c.start()
	}
	c.mu.Unlock()
	select {
	case <-f.done:
		return f.m.clone(), f.err
	case <-ctx.Done():
		return Material{}, &Error{Code: outcome.CodeCredentialUnavailable, Reason: ReasonTimeout, Kind: c.kind, cause: ctx.Err()}
	}
}

// start begins a fetch that belongs to nobody who waits for it. c.mu is held.
func (c *Cached) start() *flight {
	f := &flight{done: make(chan struct{})}
	if !control.Off("C1-one-fetch-at-a-time") {
		c.flight = f
	}
	age := c.age
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), c.o.Timeout)
		defer cancel()
		m, err := c.guarded(ctx)
		now := time.Now()
		if c.o.Done != nil {
			c.o.Done(err == nil)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if err == nil && !m.Expires.IsZero() && !m.Expires.After(now) {
			err = &Error{Code: outcome.CodeCredentialUnavailable, Reason: ReasonExpired, Kind: c.kind}
		}
		if age != c.age {
			// What it was made of was taken away meanwhile: who waits gets it, nobody later.
			f.m, f.err = m, err
			close(f.done)
			return
		}
		if err != nil {
			c.failed, c.until = err, now.Add(c.o.Retry)
			if c.held && !c.hard.IsZero() && !now.Before(c.hard) {
				c.drop()
			}
		} else {
			c.drop()
			c.take(m, now)
		}
		f.m, f.err = m, err
		c.flight = nil
		close(f.done)
	}()
	return f
}

// guarded keeps a library that panics from ending the process: its value may quote a
// secret and goes nowhere (CONTRACT C2).
func (c *Cached) guarded(ctx context.Context) (m Material, err error) {
	defer func() {
		if recover() != nil {
			m, err = Material{}, &Error{Code: outcome.CodeCredentialInvalid, Reason: ReasonSource, Kind: c.kind}
		}
	}()
	m, err = c.fetch(ctx)
	if err != nil {
		var e *Error
		if !errors.As(err, &e) && ctx.Err() != nil {
			err = &Error{Code: outcome.CodeCredentialUnavailable, Reason: ReasonTimeout, Kind: c.kind, cause: ctx.Err()}
		}
		return Material{}, err
	}
	return m, nil
}

// Forget implements Forgetter. A fetch that runs goes on for those who wait for it.
func (c *Cached) Forget() {
	c.mu.Lock()
	c.age++
	c.drop()
	c.failed, c.flight, c.doubt = nil, nil, time.Time{}
	c.mu.Unlock()
	if c.o.Forget != nil {
		c.o.Forget()
	}
}

func (c *Cached) drop() {
	// f.m of a flight that is still read shares no bytes: take clones.
	clear(c.cur.Raw)
	c.cur, c.held = Material{}, false
}

func (c *Cached) take(m Material, now time.Time) {
	c.cur, c.held, c.failed = m.clone(), true, nil
	c.soft, c.hard = time.Time{}, time.Time{}
	end := m.Expires
	margin := time.Duration(0)
	switch life := end.Sub(now); {
	case !end.IsZero():
		if margin = c.o.Margin; margin == 0 {
			margin = 10 * time.Second
		}
		margin = min(margin, life/10)
	case c.o.Refresh > 0:
		end = now.Add(c.o.Refresh)
	default:
		return
	}
	c.hard = end.Add(-margin)
	c.soft = now.Add(c.hard.Sub(now) * 4 / 5)
}

// suspectEvery bounds the renewals for doubts: any caller that an origin refuses
// raises one.
const suspectEvery = time.Minute

// Suspect implements Renewable.
func (c *Cached) Suspect(issue string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); c.held && c.cur.Issue == issue && (c.doubt.IsZero() || now.Sub(c.doubt) > suspectEvery) {
		c.doubt = now
		c.drop()
	}
}
