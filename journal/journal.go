package journal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/badger/v4"
	"golang.org/x/crypto/chacha20poly1305"

	"waybill/dispatch"
	"waybill/journal/internal/hooks"
)

// Journal implements dispatch.Journal. It is safe for concurrent use.
type Journal struct {
	opt    Options
	hooks  *hooks.Hooks
	log    *slog.Logger
	folder *folder
	db     *badger.DB
	store  *storeLogger
	seal   *sealer
	boot   bootID
	bootID string

	recovery *Recovery
	// named are the actions that the witness knows more of than the store does; set
	// in quarantine and when opened for reading.
	named   map[dispatch.ActionID]lostAttempt
	unnamed uint64 // position.unnamed
	// restored: this is a backup whose quarantine has not ended, or ends with this start.
	restored bool

	queue  chan *request
	hurry  chan struct{} // somebody in the queue waits
	budget *budget       // bytes of sealed chunks that wait in the queue

	// closing ends the committer when the queue is empty; stopped is set when a
	// commit became indeterminate.
	mu       sync.RWMutex // held for reading while a request enters the queue
	closed   bool
	closing  chan struct{}
	finished chan struct{} // the committer has returned
	poisoned chan struct{}
	poison   sync.Once
	cause    atomic.Pointer[error]

	relaxed   relaxedStates
	watch     watchers
	space     spaceGate
	absence   absence
	retention retention
	stats     counters
	sessions  sync.Mutex                    // one event of a session at a time
	hold      atomic.Pointer[func() uint64] // see Hold

	// c belongs to the committer.
	c committer
	// sweeper and watcher goroutines.
	background sync.WaitGroup
	closeOnce  sync.Once
	closeErr   error
}

var _ dispatch.Journal = (*Journal)(nil)

const queueLength = 1024

// States of a request. Caller and committer race for them with compare-and-swap:
// whoever loses takes the other's word.
const (
	stateQueued    = iota // nothing of it was looked at
	stateTaken            // the committer works on it
	stateReleased         // the answer is set
	stateAbandoned        // the caller has left with an answer of its own
)

// request is one Append on its way through the committer.
type request struct {
	state   atomic.Int32
	done    chan struct{}
	entered time.Time

	action  dispatch.ActionID
	events  []dispatch.Event
	frame   []byte  // the value that the events are stored in, not sealed yet: see framed
	version byte    // of the frame: how it holds them
	text    int     // bytes of their JSON
	chunks  []entry // sealed
	parts   []part  // what chunks hold
	key     []byte  // the key of its idempotency key, taken here; nil: none
	kept    []entry // the sealed request
	request []byte  // the key that holds the caller's request id; nil: none
	caller  digest  // of ACTION_ACCEPTED
	relaxed bool
	held    int64                                    // of the budget
	boot    bool                                     // a frame without an action: BOOT, a session
	also    func(first uint64) []entry               // what is written beside it
	maint   []entry                                  // maintenance of this package: entries without events
	plan    func(*snapshot, *stage) ([]entry, error) // the same, decided when its turn comes
	call    func() error                             // run between two groups; nothing is written
	// recovering lets a request through that a start makes.
	recovering bool

	before  *dispatch.Record // of the action; nil: it is new
	rec     *dispatch.Record // a projection's, which nobody changes any more
	earlier dispatch.ActionID
	err     error
}

// part describes a chunk.
type part struct {
	attempt, index int
	last           bool
	bytes          int
}

// set takes the JSON of the request's events.
func (r *request) set(text []byte) {
	r.text = len(text)
	payload, version := packed(text)
	r.frame, r.version = framed(payload), version
}

// frameRoom is what a frame's value has before the events: what sealing adds, and the
// frame's head.
const frameRoom = 1 + hashBytes + nonceBytes + frameHead

// framed puts the events where they will be in their frame's value: it is sealed in place,
// once there is room for it in a group.
func framed(events []byte) []byte {
	return append(make([]byte, frameRoom, frameRoom+len(events)+chacha20poly1305.Overhead), events...)
}

// seal seals the frame; r.frame is of no use any more.
func (r *request) seal(s *sealer, key []byte, before *digest, boot bootID) []byte {
	appendHead(r.frame[:frameRoom-frameHead], r.version, r.action, boot, len(r.events))
	return s.sealIn(key, before[:], r.frame)
}

// payload is the length of the events, as stored.
func (r *request) payload() int64 { return int64(max(0, len(r.frame)-frameRoom)) }

func (r *request) size() int64 {
	n := r.payload()
	for i := range r.chunks {
		n += r.chunks[i].bytes()
	}
	for i := range r.kept {
		n += r.kept[i].bytes()
	}
	for i := range r.maint {
		n += r.maint[i].bytes()
	}
	return n
}

// Append implements dispatch.Journal. Events are copied; the caller may change them
// afterwards. For a relaxed batch Receipt.Record is what the queue will make of it:
// its sequence numbers are estimates.
func (j *Journal) Append(ctx context.Context, b dispatch.Batch) (dispatch.Receipt, error) {
	r, err := j.build(ctx, b)
	if err != nil {
		j.refused(err)
		return dispatch.Receipt{}, err
	}
	if b.Relaxed {
		rec, earlier, err := j.relaxed.apply(j, r)
		if err != nil {
			j.budget.release(r.held)
			j.refused(err)
			return dispatch.Receipt{Record: rec, Earlier: earlier}, err
		}
		if err := j.enqueue(ctx, r); err != nil {
			j.relaxed.done(r.action, true, nil)
			j.budget.release(r.held)
			j.refused(err)
			return dispatch.Receipt{}, err
		}
		return dispatch.Receipt{Record: rec}, nil
	}
	if err := j.enqueue(ctx, r); err != nil {
		j.budget.release(r.held)
		j.refused(err)
		return dispatch.Receipt{}, err
	}
	if err := r.wait(ctx); err != nil {
		j.refused(err)
		return dispatch.Receipt{Record: r.result(), Earlier: r.holder()}, err
	}
	return dispatch.Receipt{Record: *r.rec}, nil
}

// result and holder are what the committer answered, if it answered.
func (r *request) result() dispatch.Record {
	if r.state.Load() == stateReleased && r.rec != nil {
		return *r.rec
	}
	return dispatch.Record{}
}

func (r *request) holder() dispatch.ActionID {
	if r.state.Load() == stateReleased {
		return r.earlier
	}
	return dispatch.ActionID{}
}

// wait returns the committer's answer, or gives the request up when ctx ends. The
// caller may dispatch only on a nil return: it has then won or lost against nobody.
func (r *request) wait(ctx context.Context) error {
	if ctx.Done() == nil {
		<-r.done // as a select would, at half the price
		return r.err
	}
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
	}
	if r.state.CompareAndSwap(stateQueued, stateAbandoned) {
		return fmt.Errorf("%w: the caller left before it was taken up: %w", dispatch.ErrNotWritten, context.Cause(ctx))
	}
	if r.state.CompareAndSwap(stateTaken, stateAbandoned) {
		return fmt.Errorf("%w: the caller left while it was being written: %w", dispatch.ErrIndeterminate, context.Cause(ctx))
	}
	<-r.done // released at the same moment: the answer is known
	return r.err
}

// take is the committer's: false when the caller has left.
func (r *request) take() bool { return r.state.CompareAndSwap(stateQueued, stateTaken) }

// release answers a taken request.
func (r *request) release(err error) {
	r.err = err
	if err != nil && !errors.Is(err, dispatch.ErrRequestIDTaken) && !errors.Is(err, dispatch.ErrKeyTaken) && !errors.Is(err, dispatch.ErrIllegalTransition) {
		r.rec = nil
	}
	if r.state.CompareAndSwap(stateTaken, stateReleased) {
		close(r.done)
	}
}

// build checks a batch and does what needs no order: copying, encoding, sealing.
func (j *Journal) build(ctx context.Context, b dispatch.Batch) (*request, error) {
	if err := j.accepting(); err != nil {
		return nil, err
	}
	switch {
	case b.Action.IsZero():
		return nil, fmt.Errorf("%w: no action", dispatch.ErrNotWritten)
	case len(b.Events) == 0 && len(b.Chunks) == 0:
		return nil, fmt.Errorf("%w: empty batch", dispatch.ErrNotWritten)
	case len(b.Events) > maxBatchEvents:
		return nil, fmt.Errorf("%w: %d events", ErrTooLarge, len(b.Events))
	}
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
	}
	r := &request{done: make(chan struct{}), entered: time.Now(), action: b.Action, relaxed: b.Relaxed}
	if len(b.Events) > 0 {
		var err error
		if r.events, err = copied(b.Events); err != nil {
			return nil, err
		}
		if err = r.encode(); err != nil {
			return nil, err
		}
		// As if nothing were packed: what is read must fit, too.
		if r.text > maxStoredValue-frameHead-sealOverhead-hashBytes {
			return nil, fmt.Errorf("%w: events of %d bytes", ErrTooLarge, r.text)
		}
		if a := r.events[0].Accepted; a != nil {
			r.caller = j.seal.mac(macCaller, a.Caller)
			if a.RequestID != "" {
				r.request = keyRequest(j.seal.mac(macRequest, a.Caller, a.RequestID))
			}
		}
	}
	total := int64(0)
	for i := range b.Chunks {
		c := &b.Chunks[i]
		if c.Attempt < dispatch.HeldRequest || c.Index < 0 || int64(c.Attempt) > 1<<31 || int64(c.Index) > 1<<31 {
			return nil, fmt.Errorf("%w: chunk without a place", dispatch.ErrNotWritten)
		}
		if len(c.Data) > dispatch.MaxChunkBytes {
			return nil, fmt.Errorf("%w: chunk of %d bytes", ErrTooLarge, len(c.Data))
		}
		total += int64(len(c.Data))
	}
	if len(b.Request) > maxKept {
		return nil, fmt.Errorf("%w: a request of %d bytes is to be kept", ErrTooLarge, len(b.Request))
	}
	total += int64(len(b.Request))
	if total+r.payload() > maxTxnBytes-(64<<10) {
		return nil, fmt.Errorf("%w: %d bytes", ErrTooLarge, total)
	}
	held, err := j.budget.acquire(ctx, total)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
	}
	r.held = held
	if len(b.Request) > 0 {
		r.kept = j.sealKept(b.Action, b.Request)
	}
	if n := len(b.Chunks); n > 0 {
		r.chunks, r.parts = make([]entry, 0, n), make([]part, 0, n)
	}
	for i := range b.Chunks {
		c := &b.Chunks[i]
		r.chunks = append(r.chunks, j.seal.sealChunk(b.Action, *c))
		r.parts = append(r.parts, part{attempt: c.Attempt, index: c.Index, last: c.Last, bytes: len(c.Data)})
	}
	return r, nil
}

// accepting reports why no Append is taken, whatever its content.
func (j *Journal) accepting() error {
	select {
	case <-j.poisoned:
		return ErrStopped
	default:
	}
	switch {
	case j.opt.ReadOnly:
		return ErrReadOnly
	case j.recovery.Quarantined:
		return dispatch.ErrQuarantined
	}
	return nil
}

// enqueue hands a request to the committer. After a nil return the request will be
// answered, whatever happens.
func (j *Journal) enqueue(ctx context.Context, r *request) error {
	j.mu.RLock()
	defer j.mu.RUnlock()
	if j.closed {
		return ErrClosed
	}
	if !r.relaxed {
		defer j.hurried()
	}
	select {
	case j.queue <- r:
		return nil
	default:
	}
	select {
	case j.queue <- r:
		return nil
	case <-j.poisoned:
		return ErrStopped
	case <-ctx.Done():
		return fmt.Errorf("%w: the caller left before it was queued: %w", dispatch.ErrNotWritten, context.Cause(ctx))
	}
}

// hurried tells the committer that somebody waits.
func (j *Journal) hurried() {
	select {
	case j.hurry <- struct{}{}:
	default: // it was told, and looks at the whole queue
	}
}

// refused counts a refusal by its closed reason.
func (j *Journal) refused(err error) {
	reason := ""
	switch {
	case !errors.Is(err, dispatch.ErrNotWritten):
		return // indeterminate: counted by Stopped
	case errors.Is(err, dispatch.ErrRequestIDTaken), errors.Is(err, dispatch.ErrKeyTaken):
		reason = reasonRequestID
	case errors.Is(err, dispatch.ErrIllegalTransition):
		reason = reasonIllegal
	case errors.Is(err, ErrTooLarge):
		reason = reasonTooLarge
	case errors.Is(err, ErrNoSpace):
		reason = reasonSpace
	case errors.Is(err, ErrStopped), errors.Is(err, errStoreFailed), errors.Is(err, ErrClosed), errors.Is(err, ErrReadOnly), errors.Is(err, dispatch.ErrQuarantined):
		reason = reasonState
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		reason = reasonGone
	default:
		reason = reasonInvalid
	}
	j.stats.refused.Add(1)
	j.opt.Metrics.AppendRefused(reason)
}

// Admit implements dispatch.Journal: quarantine, an indeterminate commit, a closed
// journal or too little free space refuse new work (CONTRACT M5).
func (j *Journal) Admit() error {
	if err := j.accepting(); err != nil {
		return err
	}
	if j.Closed() {
		return ErrClosed
	}
	return j.space.check(j)
}

// Poisoned is closed when a commit became indeterminate. The process must then
// answer who waits, end with its own exit code and start again (CONTRACT M5).
func (j *Journal) Poisoned() <-chan struct{} { return j.poisoned }

// Cause says why Poisoned is closed; nil while it is open. Its text holds no
// recorded data.
func (j *Journal) Cause() error {
	if p := j.cause.Load(); p != nil {
		return *p
	}
	return nil
}

// stop poisons the journal.
func (j *Journal) stop(cause error) {
	j.poison.Do(func() {
		j.cause.Store(&cause)
		j.log.Error("journal stopped: a commit is indeterminate", slog.Any("error", cause))
		j.opt.Metrics.Stopped() // whoever sees that it has stopped finds it counted
		close(j.poisoned)
	})
}

// Recovery returns what Open found and did.
func (j *Journal) Recovery() Recovery { return *j.recovery }

// Closed reports whether Close was called.
func (j *Journal) Closed() bool {
	j.mu.RLock()
	defer j.mu.RUnlock()
	return j.closed
}

// Close answers what is queued, writes a checkpoint and closes the files. After an
// indeterminate commit it waits no longer than the commit deadline, and its error
// wraps dispatch.ErrIndeterminate.
func (j *Journal) Close() error {
	j.closeOnce.Do(func() { j.closeErr = j.shut() })
	return j.closeErr
}

// stoppedCloseLimit is how long Close waits for a store that has failed already.
const stoppedCloseLimit = time.Second

func (j *Journal) shut() error {
	j.mu.Lock()
	j.closed = true
	j.mu.Unlock()
	close(j.closing)
	if j.finished != nil {
		<-j.finished
	}
	j.background.Wait()
	j.watch.close()

	stopped := j.Cause() != nil
	// Badger writes its memory into a table when it is closed, and tries for ever where there is
	// no room. What was acknowledged is in the witness: the next start makes it again.
	flush := j.opt.ReadOnly || j.space.write(j) == nil
	if !flush {
		j.log.Warn("journal: no space to close the store in an orderly way; the next start makes its last groups again")
	}
	done := make(chan error, 1)
	go func() {
		j.c.writers.Wait() // one whose answer nobody waited for may still run
		var err error
		if j.c.behind != nil {
			j.c.behind.shut()
		}
		if flush {
			err = j.db.Close()
		}
		if err != nil {
			err = &storeError{"close"}
		}
		if j.c.witness != nil {
			err = errors.Join(err, j.c.witness.close())
		}
		done <- errors.Join(err, j.folder.close())
	}()
	var err error
	limit := j.opt.CommitDeadline
	if stopped {
		// Badger tries a failing flush again for ever; whatever it still writes, only the
		// next start can tell what is on disk (M5).
		limit = min(limit, stoppedCloseLimit)
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case err = <-done:
	case <-timer.C:
		err = errors.New("journal: the store does not close")
		stopped = true
	}
	if stopped || j.Cause() != nil { // the last group, too, went into the store behind its answer
		return fmt.Errorf("%w: %w", dispatch.ErrIndeterminate, errors.Join(j.Cause(), err))
	}
	return err
}

// budget bounds the bytes that wait in the queue, so that many large results do not
// add up in memory.
type budget struct {
	turn chan struct{} // one acquirer at a time collects, so that two never wait for each other
	free chan struct{} // tokens
}

const (
	budgetToken = 64 << 10
	budgetBytes = 8 << 20
)

func newBudget() *budget {
	b := &budget{turn: make(chan struct{}, 1), free: make(chan struct{}, budgetBytes/budgetToken)}
	for range cap(b.free) {
		b.free <- struct{}{}
	}
	return b
}

// acquire takes n bytes, rounded up; little ones are free.
func (b *budget) acquire(ctx context.Context, n int64) (held int64, err error) {
	if n < budgetToken/4 {
		return 0, nil
	}
	tokens := (n + budgetToken - 1) / budgetToken
	select {
	case b.turn <- struct{}{}:
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	defer func() { <-b.turn }()
	for held < tokens {
		select {
		case <-b.free:
			held++
		case <-ctx.Done():
			b.release(held)
			return 0, context.Cause(ctx)
		}
	}
	return held, nil
}

func (b *budget) release(held int64) {
	for range held {
		b.free <- struct{}{}
	}
}

// relaxedStates projects relaxed batches when they are queued, so that their caller
// learns at once what the committer will find (F1). An action is in it while a
// relaxed batch of it waits, and from then on until it has ended: its next batch need not
// read the store. The committer never reads it, and tells it what became of each batch.
type relaxedStates struct {
	mu      sync.Mutex
	actions map[dispatch.ActionID]*relaxedState
	some    atomic.Bool // there are actions
	idle    int         // of which no batch waits
}

type relaxedState struct {
	rec     dispatch.Record
	waiting int // batches
}

// maxRelaxed bounds the actions of which no batch waits.
const maxRelaxed = 4 * queueLength

func (s *relaxedStates) apply(j *Journal, r *request) (rec dispatch.Record, earlier dispatch.ActionID, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.actions[r.action]
	if st == nil && (r.request != nil || len(r.events) == 0 || r.events[0].Type != dispatch.ActionAccepted) {
		s.mu.Unlock() // nobody waits for this reader
		rec, earlier, err = j.relaxedBase(r)
		s.mu.Lock()
		if err != nil {
			return rec, earlier, err
		}
		st = s.actions[r.action]
	}
	if st != nil {
		rec = st.rec
	}
	seq := max(j.stats.seq.Load(), rec.LastSeq)
	if rec, err = dispatch.ApplyAll(rec, r.events, seq+1); err != nil {
		return rec, earlier, err
	}
	rec.ID = r.action
	if st == nil {
		if s.idle >= maxRelaxed {
			maps.DeleteFunc(s.actions, func(_ dispatch.ActionID, st *relaxedState) bool { return st.waiting == 0 })
			s.idle = 0
		}
		if s.actions == nil {
			s.actions = make(map[dispatch.ActionID]*relaxedState)
		}
		st = &relaxedState{}
		s.actions[r.action] = st
		s.some.Store(true)
	} else if st.waiting == 0 {
		s.idle--
	}
	st.rec = rec
	st.waiting++
	return rec, earlier, nil
}

// relaxedBase reads what the store knows of the action, and of its request id.
func (j *Journal) relaxedBase(r *request) (rec dispatch.Record, earlier dispatch.ActionID, err error) {
	err = j.peek(func(txn *snapshot) error {
		p, err := j.readProjection(txn, r.action)
		if err != nil {
			return err
		}
		if p != nil {
			rec = p.rec
		}
		if r.request == nil {
			return nil
		}
		v, found, err := get(txn, r.request)
		if err == nil && found && len(v) == len(earlier) && dispatch.ActionID(v) != r.action {
			earlier = dispatch.ActionID(v)
			return dispatch.ErrRequestIDTaken
		}
		return err
	})
	if err != nil && !errors.Is(err, dispatch.ErrNotWritten) {
		err = fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
	}
	return rec, earlier, err
}

// done is told that a batch of id has left the queue, before who waits for it hears of it, and
// what the action is then; nil: the batch was not written.
func (s *relaxedStates) done(id dispatch.ActionID, relaxed bool, rec *dispatch.Record) {
	if !s.some.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.actions[id]
	if st == nil {
		return
	}
	was := st.waiting
	if relaxed {
		st.waiting--
	}
	if st.waiting > 0 {
		return // what waits was projected on it already
	}
	if rec == nil || rec.Ended {
		if was == 0 {
			s.idle--
		}
		delete(s.actions, id)
		s.some.Store(len(s.actions) > 0)
		return
	}
	if was > 0 {
		s.idle++
	}
	st.rec = *rec
}

// readProjection returns the stored projection, or nil when there is none. A value
// that does not open is a *CorruptError, never an absence (M7).
func (j *Journal) readProjection(txn *snapshot, id dispatch.ActionID) (*projection, error) {
	key := keyAction(famRecord, id)
	v, found, err := get(txn, key)
	if err != nil || !found {
		return nil, err
	}
	plain, _, ok := j.seal.open(key, v, 0)
	if !ok {
		return nil, &CorruptError{What: "projection does not open", Action: id}
	}
	p, err := decodeProjection(plain)
	if err == nil && p.brief {
		p.rec, err = j.fromFrames(txn, id, p.frames)
		if err != nil {
			return nil, err
		}
	}
	if err != nil || p.rec.ID != id {
		return nil, &CorruptError{What: "projection does not decode", Action: id}
	}
	return p, nil
}

// fromFrames makes the record of a brief projection from its frames, which the same
// view holds.
func (j *Journal) fromFrames(txn *snapshot, id dispatch.ActionID, frames []uint64) (rec dispatch.Record, err error) {
	rec.ID = id
	for _, first := range frames {
		f, _, err := j.frameOf(txn, id, first)
		if err != nil {
			return dispatch.Record{}, err
		}
		for i := range f.events {
			seq := first + uint64(i)
			if rec, err = dispatch.Apply(rec, &f.events[i], seq); err != nil {
				return dispatch.Record{}, &CorruptError{What: "event is illegal where it stands", Seq: seq, Action: id}
			}
		}
	}
	return rec, nil
}

// between runs f between two groups: nothing is being written while it runs. Where
// there is no committer, or it has stopped, nothing ever is.
func (j *Journal) between(f func() error) error {
	if j.finished == nil || j.Cause() != nil {
		return f()
	}
	r := &request{done: make(chan struct{}), entered: time.Now(), call: f}
	if err := j.enqueue(context.Background(), r); err != nil {
		if errors.Is(err, ErrStopped) {
			return f()
		}
		return err
	}
	<-r.done
	if errors.Is(r.err, dispatch.ErrIndeterminate) && j.Cause() != nil {
		return f()
	}
	return r.err
}

// jsonEvents is used where an event is made here.
func jsonEvents(ev ...dispatch.Event) ([]dispatch.Event, []byte) {
	out, b, err := prepare(ev)
	if err != nil {
		panic("journal: own event: " + err.Error())
	}
	if !json.Valid(b) {
		panic("journal: own event is not JSON")
	}
	return out, b
}
