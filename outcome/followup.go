package outcome

// Resolution is a piece of evidence that came after the attempt: the answer of a query,
// an operator's attestation, or what another journal has (CONTRACT K1–K5). It stands
// beside the attempts and changes none of them.
type Resolution struct {
	Source   Source  `json:"source"`
	Outcome  Outcome `json:"outcome"`
	Sequence uint64  `json:"sequence,omitempty"` // of this journal
	// Covers is the last attempt that it speaks of; 0: of the action as a whole.
	Covers   int    `json:"covers,omitempty"`
	Query    string `json:"query,omitempty"` // the action that asked
	Rule     string `json:"rule,omitempty"`  // that took the answer
	Status   int    `json:"status,omitempty"`
	Operator string `json:"operator,omitempty"` // K5
	Reason   string `json:"reason,omitempty"`
	// Origin and OriginSequence are the journal it was imported from, and its place there (K4).
	Origin         string `json:"origin,omitempty"`
	OriginSequence uint64 `json:"origin_sequence,omitempty"`
	At             string `json:"at,omitempty"` // RFC 3339, for people (M3)
}

// Job is work that the remote side accepted and does later (CONTRACT A7).
type Job struct {
	ID string `json:"id,omitempty"` // as the service calls it
	// Resource is where its state stands, without the values of its query.
	Resource string `json:"resource,omitempty"`
	// Action follows the job and has its outcome; "": nobody follows it, see Reason.
	Action string `json:"action,omitempty"`
	State  string `json:"state"` // pending, done, lost
	Polls  int    `json:"polls,omitempty"`
	Reason string `json:"reason,omitempty"`
}

// Items sums up the children of a batch (CONTRACT F7); each has an outcome of its own.
type Items struct {
	Count     int    `json:"count"`
	Committed int    `json:"committed"`
	Rejected  int    `json:"rejected"`
	Unknown   int    `json:"unknown"`
	Atomic    bool   `json:"atomic,omitempty"`
	Untracked string `json:"untracked,omitempty"` // why they cannot be told apart
}

// resolved reports whether later evidence says that the action is committed.
func (e *Evidence) resolved() bool {
	for i := range e.Resolutions {
		if e.Resolutions[i].Outcome == Committed {
			return true
		}
	}
	return false
}
