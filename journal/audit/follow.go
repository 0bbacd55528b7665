package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"waybill/internal/control"
	"waybill/journal"
)

// Source is the journal, read in order of sequence.
type Source interface {
	Frames(ctx context.Context, after uint64, limit int) ([]journal.Frame, error)
	Range() (base, head uint64, err error)
	HashAt(seq uint64) (hash [32]byte, found bool, err error)
	Room() error
}

// Metrics is told how the follower gets on. Reasons are those of Gap.
type Metrics interface {
	AuditRecords(n int)
	AuditLag(events uint64)
	AuditGap(reason string)
	AuditFailing(yes bool) // the log cannot be written at the moment
	AuditCheckpoint(at time.Time)
	AuditDelivery(ok bool) // of a checkpoint, to one destination
}

// FollowOptions say how a Follower works.
type FollowOptions struct {
	Source  Source
	To      []Destination // where checkpoints are sent
	Poll    time.Duration // how often the journal is looked at; 0: a quarter of a second
	Metrics Metrics       // nil: none
	Logger  *slog.Logger  // nil: discards
}

// Follower writes what the journal has into a Log. It is on no request's way: it reads
// what was acknowledged, when it gets to it, and catches up at a start (CONTRACT N5).
type Follower struct {
	log  *Log
	opt  FollowOptions
	send *sender
	pos  atomic.Uint64 // the synced cursor

	mu     sync.Mutex
	status Status
	failed string
}

// Status is how a Follower gets on.
type Status struct {
	Log       string            `json:"log"`
	Folder    string            `json:"folder"`
	Recipient string            `json:"recipient"`
	Signer    string            `json:"signer"`
	Records   uint64            `json:"records"`
	Seq       uint64            `json:"seq"` // the journal's events up to here are in the log
	Lag       uint64            `json:"lag"` // events that are not in it yet
	Segments  int               `json:"segments"`
	Bytes     int64             `json:"bytes"`
	Gaps      int               `json:"gaps"`              // found by this process
	Failing   string            `json:"failing,omitempty"` // why nothing is written at the moment
	Last      *Checkpoint       `json:"last_checkpoint,omitempty"`
	Delivered []DeliveredStatus `json:"to,omitempty"`
}

const (
	defaultPoll = 250 * time.Millisecond
	// Frames and bytes that are written at once: one sync and one encapsulation for all.
	portionFrames = 256
	portionBytes  = 1 << 20
	maxBackoff    = 30 * time.Second
	// finishLimit bounds the catching up at an orderly end.
	finishLimit = 5 * time.Second
)

// NewFollower takes the log over; Run closes it.
func NewFollower(l *Log, opt FollowOptions) *Follower {
	if opt.Poll <= 0 {
		opt.Poll = defaultPoll
	}
	if opt.Logger == nil {
		opt.Logger = slog.New(slog.DiscardHandler)
	}
	if opt.Metrics == nil {
		opt.Metrics = noMetrics{}
	}
	f := &Follower{log: l, opt: opt}
	f.send = newSender(opt.To, opt.Metrics, opt.Logger)
	f.pos.Store(l.at.seq)
	f.note()
	return f
}

type noMetrics struct{}

func (noMetrics) AuditRecords(int)          {}
func (noMetrics) AuditLag(uint64)           {}
func (noMetrics) AuditGap(string)           {}
func (noMetrics) AuditFailing(bool)         {}
func (noMetrics) AuditCheckpoint(time.Time) {}
func (noMetrics) AuditDelivery(bool)        {}

// Passed is the last event that is durable in the log: the journal's retention may
// remove events up to it (journal.Hold).
func (f *Follower) Passed() uint64 { return f.pos.Load() }

// Status returns how it gets on at this moment.
func (f *Follower) Status() Status {
	f.mu.Lock()
	s := f.status
	s.Failing = f.failed
	f.mu.Unlock()
	if _, head, err := f.opt.Source.Range(); err == nil && head > s.Seq {
		s.Lag = head - s.Seq
	}
	s.Delivered = f.send.status()
	return s
}

// note keeps what Status shows.
func (f *Follower) note() {
	l := f.log
	f.mu.Lock()
	defer f.mu.Unlock()
	gaps := f.status.Gaps
	f.status = Status{
		Log: fmt.Sprintf("%x", l.id[:]), Folder: l.opt.Dir, Recipient: l.opt.Recipient.String(), Signer: signerText(l),
		Records: l.count, Seq: l.at.seq, Segments: len(l.segments), Bytes: l.bytesOnDisk(), Gaps: gaps, Last: l.last,
	}
}

// Run follows the journal until ctx ends; then it catches up, writes a last checkpoint
// and closes the log.
func (f *Follower) Run(ctx context.Context) error {
	sending, stopSending := context.WithCancel(context.WithoutCancel(ctx))
	var background sync.WaitGroup
	background.Go(func() { f.send.run(sending) })
	err := f.follow(ctx)
	f.finish()
	f.send.flush(finishLimit)
	stopSending()
	background.Wait()
	return errors.Join(err, f.log.Close())
}

func (f *Follower) follow(ctx context.Context) error {
	wait := time.Duration(0)
	for {
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		more, err := f.step(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			f.failing(err)
			wait = min(max(2*wait, f.opt.Poll), maxBackoff)
		case more:
			f.failing(nil)
			wait = 0
		default:
			f.failing(nil)
			wait = f.opt.Poll
		}
	}
}

// failing tells once that it fails, and once that it goes on.
func (f *Follower) failing(err error) {
	f.mu.Lock()
	was := f.failed
	f.failed = ""
	if err != nil {
		f.failed = err.Error()
	}
	f.mu.Unlock()
	switch {
	case err != nil && was == "":
		f.opt.Logger.Error("the audit log is not written; it catches up as soon as it can be", slog.Any("error", err))
		f.opt.Metrics.AuditFailing(true)
	case err == nil && was != "":
		f.opt.Logger.Info("the audit log is written again")
		f.opt.Metrics.AuditFailing(false)
	}
}

// finish is an orderly end: what is in the journal by now is written, and checked.
func (f *Follower) finish() {
	ctx, cancel := context.WithTimeout(context.Background(), finishLimit)
	defer cancel()
	for {
		more, err := f.step(ctx)
		if err != nil {
			f.opt.Logger.Warn("the audit log is behind; the next start catches up", slog.Any("error", err))
			return
		}
		if !more {
			break
		}
	}
	if f.log.count > f.log.checkpointed {
		f.checkpoint()
	}
}

// step writes one portion; more is true when there is another.
func (f *Follower) step(ctx context.Context) (more bool, err error) {
	if err := f.opt.Source.Room(); err != nil {
		return false, err // what is free is for the ends of running actions
	}
	for _, g := range f.log.found {
		if err := f.write([]entry{gapEntry(g, f.log.at)}); err != nil {
			return false, err
		}
		f.gap(g)
	}
	f.log.found = nil
	if err := f.meet(); err != nil {
		return false, err
	}
	frames, err := f.opt.Source.Frames(ctx, f.log.at.seq, portionFrames)
	if err != nil {
		return false, err
	}
	base, head, err := f.opt.Source.Range()
	if err != nil {
		return false, err
	}
	entries, gaps, used := f.entries(frames, base)
	if len(frames) == 0 && base > f.log.at.seq {
		// Everything up to the base is gone, and nothing came since.
		hash, _, err := f.opt.Source.HashAt(base)
		if err != nil {
			return false, err
		}
		g := Gap{Reason: GapRetention, From: f.log.at.seq + 1, To: base, At: f.log.opt.Now().UTC()}
		entries, gaps = append(entries, gapEntry(g, cursor{base, hash})), append(gaps, g)
	}
	if err := f.write(entries); err != nil {
		return false, err
	}
	for _, g := range gaps {
		f.gap(g)
	}
	if f.log.checkpointDue() {
		f.checkpoint()
		if n, err := f.log.retain(); err != nil {
			f.opt.Logger.Error("audit: retention", slog.Any("error", err))
		} else if n > 0 {
			f.opt.Logger.Info("audit: retention", slog.Int("segments", n))
			f.send.offer(f.log.last)
		}
		f.note()
	}
	lag := uint64(0)
	if head > f.log.at.seq {
		lag = head - f.log.at.seq
	}
	f.opt.Metrics.AuditLag(lag)
	return used < len(frames) || len(frames) == portionFrames, nil
}

// write appends and moves the cursor that retention goes by.
func (f *Follower) write(entries []entry) error {
	if len(entries) == 0 {
		return nil
	}
	if err := f.log.append(entries); err != nil {
		return err
	}
	f.pos.Store(f.log.at.seq)
	f.opt.Metrics.AuditRecords(len(entries))
	f.note()
	return nil
}

func (f *Follower) gap(g Gap) {
	f.opt.Logger.Error("audit: a gap", slog.String("reason", g.Reason), slog.Uint64("from", g.From), slog.Uint64("to", g.To))
	f.opt.Metrics.AuditGap(g.Reason)
	f.mu.Lock()
	f.status.Gaps++
	f.mu.Unlock()
}

func (f *Follower) checkpoint() {
	c, err := f.log.checkpoint()
	if err != nil {
		f.opt.Logger.Error("audit: checkpoint", slog.Any("error", err))
	}
	if c != nil {
		f.opt.Metrics.AuditCheckpoint(c.At)
		f.send.offer(c)
	}
	f.note()
}

// entries turns frames into records, as many as one write takes; used is how many
// frames that are. A hole between them is a gap.
func (f *Follower) entries(frames []journal.Frame, base uint64) (out []entry, gaps []Gap, used int) {
	at, bytes := f.log.at, 0
	for i := range frames {
		fr := &frames[i]
		if bytes >= portionBytes {
			return out, gaps, i
		}
		if fr.First > at.seq+1 && !control.Off("N5-gaps-reported") {
			g := Gap{Reason: GapMissing, From: at.seq + 1, To: fr.First - 1, At: f.log.opt.Now().UTC()}
			if g.To <= base {
				g.Reason = GapRetention
			}
			out, gaps = append(out, gapEntry(g, cursor{seq: g.To})), append(gaps, g)
		}
		action := ""
		if !fr.Action.IsZero() {
			action = fr.Action.String()
		}
		for k := range fr.Events {
			ev := fr.Events[k]
			strip(&ev)
			plain, err := json.Marshal(sealed{action, ev})
			if err != nil { // it was read from JSON
				plain = fmt.Appendf(nil, `{"action":%q,"event":{"seq":%d}}`, action, ev.Seq)
			}
			bytes += len(plain)
			out = append(out, entry{kind: KindEvent, seq: ev.Seq, frame: fr.Hash, last: k == len(fr.Events)-1, plain: plain})
		}
		at = cursor{fr.Last, fr.Hash}
	}
	return out, gaps, len(frames)
}

func gapEntry(g Gap, at cursor) entry {
	body, err := json.Marshal(&g)
	if err != nil {
		panic("audit: gap: " + err.Error()) // numbers, a time and a fixed text: cannot fail
	}
	return entry{kind: KindGap, seq: at.seq, frame: at.frame, plain: body}
}

// meet makes sure that the journal is the one that the log has followed: its hash at
// the cursor is the one on record. A journal that was rolled back, or replaced, is on
// record as a gap, and followed from where the two agree.
func (f *Follower) meet() error {
	at := f.log.at
	if at.seq == 0 || at.frame == (digest{}) {
		return nil // nothing to compare
	}
	base, head, err := f.opt.Source.Range()
	if err != nil {
		return err
	}
	if at.seq < base {
		return nil // retention was there; a gap will be found
	}
	if at.seq <= head {
		hash, found, err := f.opt.Source.HashAt(at.seq)
		if err != nil {
			return err
		}
		if found && hash == at.frame || control.Off("N5-journal-compared") {
			return nil
		}
	}
	common, err := f.common(base, head)
	if err != nil {
		return err
	}
	g := Gap{Reason: GapRolledBack, From: common.seq + 1, To: at.seq, At: f.log.opt.Now().UTC()}
	if err := f.write([]entry{gapEntry(g, common)}); err != nil {
		return err
	}
	f.gap(g)
	return nil
}

// common finds the last place at which log and journal agree.
func (f *Follower) common(base, head uint64) (cursor, error) {
	for i := len(f.log.segments) - 1; i >= 0; i-- {
		places, err := frameEnds(f.log.path(f.log.segments[i]))
		if err != nil {
			return cursor{}, err
		}
		for k := len(places) - 1; k >= 0; k-- {
			p := places[k]
			if p.seq > head || p.seq < base {
				continue
			}
			hash, found, err := f.opt.Source.HashAt(p.seq)
			if err != nil {
				return cursor{}, err
			}
			if found && hash == p.frame {
				return p, nil
			}
		}
	}
	return cursor{}, nil // nowhere: it is followed from its beginning
}
