package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"waybill/outcome"
)

// The ways a Journal can fail. Every other error of Append is indeterminate too.
var (
	// ErrNotWritten: the journal refused before writing; nothing is or will become durable (F9).
	ErrNotWritten = errors.New("journal: not written")
	// ErrIndeterminate: the write may or may not become durable (F9). The journal
	// accepts nothing further in this process.
	ErrIndeterminate = errors.New("journal: indeterminate")
	// ErrRequestIDTaken wraps ErrNotWritten: Receipt.Earlier names the action that holds the request id.
	ErrRequestIDTaken = fmt.Errorf("%w: request id is taken", ErrNotWritten)
	// ErrIllegalTransition wraps ErrNotWritten: Apply refused the event (K2).
	ErrIllegalTransition = fmt.Errorf("%w: illegal transition", ErrNotWritten)
	// ErrKeyTaken wraps ErrNotWritten: Receipt.Earlier names the action that holds the
	// idempotency key (CONTRACT I9).
	ErrKeyTaken = fmt.Errorf("%w: idempotency key is taken", ErrNotWritten)
	// ErrNoRequest: the request of an action was not kept, or is not needed any longer.
	ErrNoRequest = errors.New("journal: no kept request")
	// ErrActionNotFound: no such action. It is no permission (M7).
	ErrActionNotFound = errors.New("journal: action not found")
	// ErrQuarantined wraps ErrNotWritten: the store is behind its witness (M5). Nothing is
	// written, and every action that is absent, or may be behind, is unknown.
	ErrQuarantined = fmt.Errorf("%w: quarantined: the store is behind its witness", ErrNotWritten)
	// ErrNoResult: the action has no complete stored result (H10).
	ErrNoResult = errors.New("journal: no complete result")
	// ErrResultDropped: there was one and retention dropped it.
	ErrResultDropped = errors.New("journal: result dropped")
)

// MaxKeptBytes bounds Batch.Request.
const MaxKeptBytes = 800 << 10

// MaxChunkBytes bounds one stored chunk of a result.
const MaxChunkBytes = 256 << 10

// Journal is what the pipeline needs of durable storage. An implementation is
// safe for concurrent use.
type Journal interface {
	// Append applies the events of one action, in order, all or nothing, together
	// with the chunks, and returns when they are durable (F1). With batch.Relaxed it
	// returns when they are queued. Errors: see above. The context bounds only the
	// time until the batch is taken up; if it ends later the answer is ErrIndeterminate.
	Append(ctx context.Context, batch Batch) (Receipt, error)
	// Admit reports whether new work may start: nil, or an error wrapping ErrNotWritten.
	Admit() error
	// Action returns the projection. ErrActionNotFound, ErrQuarantined.
	Action(ctx context.Context, id ActionID) (Record, error)
	// Events returns the action's events in order of sequence, with their positions.
	Events(ctx context.Context, id ActionID) ([]StoredEvent, error)
	// ByRequestID returns the action that holds the caller's request id, or ErrActionNotFound.
	ByRequestID(ctx context.Context, caller, requestID string) (ActionID, error)
	// Repeatable guard (O3): the latest ended action of this caller with this fingerprint
	// for which Record.GuardsRepeats() holds, or ErrActionNotFound.
	Guarding(ctx context.Context, caller, fingerprint string) (Record, error)
	// Keyed returns the action that holds an idempotency key within its scope (CONTRACT
	// I9), or ErrActionNotFound.
	Keyed(ctx context.Context, caller, scope, key string) (Record, error)
	// KeptRequest returns what Batch.Request stored, for as long as Record.KeepsRequest
	// holds; ErrNoRequest. KeptActions lists the actions that have one.
	KeptRequest(ctx context.Context, id ActionID) ([]byte, error)
	KeptActions(ctx context.Context) ([]ActionID, error)
	// Redirecting returns the latest action of this caller whose Record.RedirectKey is
	// key (R3), or ErrActionNotFound.
	Redirecting(ctx context.Context, caller, key string) (Record, error)
	// Actions iterates over projections, newest first.
	Actions(ctx context.Context, f Filter) iter.Seq2[Record, error]
	// OpenResult returns the stored result of an action. ErrNoResult, ErrResultDropped,
	// ErrActionNotFound. The body verifies every chunk and fails with an error, never
	// with a clean short end.
	OpenResult(ctx context.Context, id ActionID) (Result, io.ReadCloser, error)
	// Chunk returns one durable chunk of an attempt's answer, also before it is complete
	// (H4). ErrNoResult when it is not there (yet).
	Chunk(ctx context.Context, id ActionID, attempt, index int) ([]byte, error)
	// Watch calls f after every durable append that want is true of, in order of sequence,
	// until the returned stop is called. want (nil: all) is asked where the journal writes:
	// it must only look. f must not block; slow watchers lose events.
	Watch(want func(*Record) bool, f func(Record)) (stop func())
}

// Batch is one durable step of one action.
type Batch struct {
	Action ActionID
	Events []Event
	Chunks []Chunk
	// Request is a request to be kept, sealed, for as long as Record.KeepsRequest holds; at
	// most MaxKeptBytes. It goes with the DISPATCH_STARTED of the first attempt.
	Request []byte
	// Relaxed: do not wait for durability (F1).
	Relaxed bool
}

// Chunk is a piece of a result. Without the Result event that counts it, it is garbage (H4).
type Chunk struct {
	Attempt int
	Index   int // from 0
	Last    bool
	Data    []byte // at most MaxChunkBytes; the journal does not keep the slice
}

// Receipt is the state after an Append.
type Receipt struct {
	Record Record
	// Earlier is set with ErrRequestIDTaken.
	Earlier ActionID
}

// StoredEvent is an event with its place in the journal.
type StoredEvent struct {
	Seq  uint64 `json:"seq"`
	Hash string `json:"hash"`
	Boot string `json:"boot,omitempty"`
	Event
}

// Filter selects records. Zero values do not filter.
type Filter struct {
	Caller    string
	RequestID string
	Route     string
	Outcome   outcome.Outcome
	Phase     outcome.Phase
	Code      outcome.Code
	Since     time.Time
	OpenOnly  bool
	Doubtful  bool // Record.Doubtful only
	Limit     int  // 0: no limit
}
