package journal

import (
	"log/slog"
	"time"

	"waybill/dispatch"
	"waybill/journal/internal/hooks"
)

// Options says how a journal is opened. Only Dir is required.
type Options struct {
	// Dir is the journal's folder. It is created with mode 0700; its parent must
	// exist. One process at a time may hold it.
	Dir string
	// Key is the data key, KeyBytes long. KeyFile names a file that holds one (in the
	// form of FORMAT.md, or 64 hexadecimal digits), mode 0600 or stricter. With
	// neither, <Dir>/key is used, and made at the first start. Whoever holds the key
	// and the folder can read every stored result.
	Key     []byte
	KeyFile string
	// Build and Config (the digest of the configuration) are recorded in the BOOT event.
	Build  string
	Config string

	// Acknowledge, if not nil, leaves a quarantine (CONTRACT M5): see Acknowledgement.
	Acknowledge *Acknowledgement

	// ReadOnly opens for reading commands while no proxy runs: nothing is recorded, no
	// open action is closed on disk – reads show what a start would make of it. The
	// store's own files are still opened for writing: Badger repairs them.
	ReadOnly bool
	// AllowAnyFilesystem skips the check of the file system's type. On tmpfs,
	// overlayfs, FUSE or NFS a record that was acknowledged may be gone after a crash.
	AllowAnyFilesystem bool
	// MinFreeBytes is the free space below which no new work is admitted (M5), without
	// what open actions need to end; 0: 176 MiB and a sixteenth of the store. Below half
	// of it, or 64 MiB, nothing is written any more, and Open refuses: see space.go.
	MinFreeBytes int64
	// CommitDeadline bounds one commit; when it passes, the commit is indeterminate
	// and the journal stops. 0: 30 s.
	CommitDeadline time.Duration
	// SweepInterval is the time between two looks for expired results; 0: one minute,
	// negative: never.
	SweepInterval time.Duration

	// Retention is how long the records of ended actions are kept; 0: for good. MaxBytes
	// bounds what is kept: beyond seven eighths of it results are dropped, oldest
	// action first but for those of the newest half, beyond it records; 0: no limit. On disk the store takes up to
	// twice as much until it is compacted. Open actions and unknown ones that were not
	// resolved are never removed.
	Retention time.Duration
	MaxBytes  int64

	Metrics Metrics          // nil: none
	Logger  *slog.Logger     // nil: discards
	Now     func() time.Time // nil: time.Now; for people and for retention, never for order (M3)

	// Hooks is nil in production. Its type is internal to this folder: only the
	// journal's own tests and package journaltest can set it.
	Hooks *hooks.Hooks
}

const (
	defaultCommitDeadline = 30 * time.Second
	defaultSweepInterval  = time.Minute
	// checkpointEvery bounds the events that a start has to walk.
	checkpointEvery = 4096
)

func (o *Options) withDefaults() {
	if o.CommitDeadline <= 0 {
		o.CommitDeadline = defaultCommitDeadline
	}
	if o.SweepInterval == 0 {
		o.SweepInterval = defaultSweepInterval
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Hooks == nil {
		o.Hooks = &hooks.Hooks{}
	}
	if o.Metrics == nil {
		o.Metrics = noMetrics{}
	}
}

// Metrics is told what the journal does. Calls come from the goroutines that write, more
// than one: they must neither block nor read the journal. Label values are from closed
// lists (CONTRACT S2).
type Metrics interface {
	// Applied is called for every append that became durable, before it is answered, in
	// order of sequence: the action's projection ahead of it (nil: a new action) and after
	// it, and the events. What is passed is read only, and not kept.
	Applied(before, after *dispatch.Record, events []dispatch.Event)
	// Found is called by Open for every action of the store about which something may still
	// be found out (Record.Doubtful) or a person is asked, before anything is appended.
	Found(r *dispatch.Record)
	// GroupCommitted is called after every group that became durable.
	GroupCommitted(g Group)
	// AppendRefused counts answers that wrap dispatch.ErrNotWritten; reason is one of
	// RefusalReasons.
	AppendRefused(reason string)
	// Stopped is called once, when a commit became indeterminate (M5).
	Stopped()
	// Dropped counts results that retention dropped.
	Dropped(results int, bytes int64)
}

// Group describes one group commit.
type Group struct {
	Requests int           // appends that shared it
	Events   int           // events in it
	Bytes    int64         // written to the store
	Syncs    int           // sync system calls since the group before, this one's included: one, and a few where a segment began
	Wait     time.Duration // from the oldest request's arrival to the group's start
	Witness  time.Duration // the witness's write, its sync included
	Total    time.Duration // until it was durable: the projection and the witness
}

// RefusalReasons returns the values of Metrics.AppendRefused's label.
func RefusalReasons() []string {
	return []string{reasonIllegal, reasonRequestID, reasonTooLarge, reasonInvalid, reasonSpace, reasonState, reasonGone}
}

const (
	reasonIllegal   = "illegal_transition"
	reasonRequestID = "request_id_taken"
	reasonTooLarge  = "too_large"
	reasonInvalid   = "invalid"
	reasonSpace     = "no_space"
	reasonState     = "not_accepting"
	reasonGone      = "caller_gone"
)

type noMetrics struct{}

func (noMetrics) Applied(_, _ *dispatch.Record, _ []dispatch.Event) {}
func (noMetrics) Found(*dispatch.Record)                            {}
func (noMetrics) GroupCommitted(Group)                              {}
func (noMetrics) AppendRefused(string)                              {}
func (noMetrics) Stopped()                                          {}
func (noMetrics) Dropped(int, int64)                                {}
