package outcome

import (
	"encoding/json"
	"errors"
	"fmt"
)

// ErrNotEnvelope is wrapped by decoding errors for JSON that has no place for
// the facts an envelope must show.
var ErrNotEnvelope = errors.New("not an envelope")

// Facts are the three independent facts of an action or attempt, and the code
// that names its ending (CONTRACT A1).
type Facts struct {
	Phase   Phase   `json:"phase"`
	Outcome Outcome `json:"outcome"`
	Retry   Retry   `json:"retry"`
	Code    Code    `json:"code,omitempty"` // CodeNone for a success
}

// Envelope is the JSON form of every failure that Waybill answers itself
// (CONTRACT L1) and of an action seen through the caller API.
type Envelope struct {
	// InvocationID is "act_" + ULID; empty only where no action exists (M6, M7).
	InvocationID string `json:"invocation_id,omitempty"`
	// Error is nil for an action that succeeded, and for nothing else: such an
	// envelope shows a complete response in its evidence (G1), or the later evidence that
	// resolved it (K2).
	Error *Error `json:"error,omitempty"`
	// Message repeats Error.Message for clients that look at the top level (L8).
	Message  string   `json:"message,omitempty"`
	Evidence Evidence `json:"evidence"`
}

// Error carries the facts and one text for people (CONTRACT L1, L2).
type Error struct {
	Code    Code    `json:"code"`
	Phase   Phase   `json:"phase,omitempty"` // with Outcome and Retry absent only for ACTION_NOT_FOUND (M7)
	Outcome Outcome `json:"outcome,omitempty"`
	Retry   Retry   `json:"retry,omitempty"`
	Message string  `json:"message"` // first sentence is the instruction (L8); never parsed
}

// Facts returns the facts of the error.
func (e *Error) Facts() Facts { return Facts{e.Phase, e.Outcome, e.Retry, e.Code} }

// complete reports whether the error has a code, and the facts that its code needs.
func (e *Error) complete() error {
	f := e.Facts()
	switch {
	case f.Code == CodeNone:
		return fmt.Errorf("outcome: error without a code: %w", ErrNotEnvelope)
	case Lookup(f.Code).factless() && f == Facts{Code: f.Code}:
		return nil
	default:
		return f.known()
	}
}

// MarshalJSON refuses an error without a code, or without the facts its code
// needs, with ErrNotEnvelope or ErrUnknownValue: a fact is never left out silently
// (CONTRACT A8).
func (e Error) MarshalJSON() ([]byte, error) {
	if err := e.complete(); err != nil {
		return nil, err
	}
	type plain Error
	return json.Marshal(plain(e))
}

// UnmarshalJSON refuses what MarshalJSON refuses, and unknown values (CONTRACT A8).
// It does not check the combination of facts: Facts.Validate does.
func (e *Error) UnmarshalJSON(data []byte) error {
	type plain Error
	var p plain
	if err := json.Unmarshal(data, &p); err != nil {
		return err
	}
	if err := (*Error)(&p).complete(); err != nil {
		return err
	}
	*e = Error(p)
	return nil
}

// Facts returns the facts that the envelope carries: those of its error, or
// Success where it has none.
func (e *Envelope) Facts() Facts {
	if e.Error == nil {
		return Success()
	}
	return e.Error.Facts()
}

// UnmarshalJSON refuses an envelope that has neither an error nor the evidence of
// a complete response, nor later evidence of success, with ErrNotEnvelope: "{}" is no success. Unknown values of
// the closed enumerations are refused with ErrUnknownValue (CONTRACT A8); unknown
// fields are ignored, since evidence may grow.
func (e *Envelope) UnmarshalJSON(data []byte) error {
	type plain Envelope
	var p plain
	if err := json.Unmarshal(data, &p); err != nil {
		return err
	}
	if p.Error == nil && !p.Evidence.ResponseComplete && !p.Evidence.resolved() {
		return fmt.Errorf("outcome: neither an error nor a complete response: %w", ErrNotEnvelope)
	}
	for i := range p.Evidence.Attempts {
		if _, err := p.Evidence.Attempts[i].Outcome.MarshalText(); err != nil {
			return fmt.Errorf("attempt without an outcome: %w", err)
		}
	}
	*e = Envelope(p)
	return nil
}

// Source says who observed a piece of evidence (CONTRACT K1). "" when there is none.
type Source string

// The sources of evidence.
const (
	TransportObserved Source = "transport_observed"
	RemoteResponse    Source = "remote_response"
	RemoteQuery       Source = "remote_query"
	OperatorAttested  Source = "operator_attested"
)

// Sources returns every source of evidence.
func Sources() []Source {
	return []Source{TransportObserved, RemoteResponse, RemoteQuery, OperatorAttested}
}

// Stage is the last completed step of connection setup (CONTRACT E2). "" before DNS.
type Stage string

// The stages of connection setup, in order; SSH continues after tcp_connect.
const (
	StageDNS          Stage = "dns"
	StageTCPConnect   Stage = "tcp_connect"
	StageProxyTunnel  Stage = "proxy_tunnel"
	StageTLSHandshake Stage = "tls_handshake"
	StageSSHTransport Stage = "ssh_transport"
	StageSSHHostKey   Stage = "ssh_host_key"
	StageSSHAuth      Stage = "ssh_auth"
	StageSSHChannel   Stage = "ssh_channel"
	StageSSHEnv       Stage = "ssh_env"
)

// Stages returns every stage of connection setup, in order.
func Stages() []Stage {
	return []Stage{
		StageDNS, StageTCPConnect, StageProxyTunnel, StageTLSHandshake,
		StageSSHTransport, StageSSHHostKey, StageSSHAuth, StageSSHChannel, StageSSHEnv,
	}
}

// Evidence says how Waybill knows (CONTRACT L3). It never holds secrets, whole
// authorization fields or unfiltered remote bodies (L4). Fields may be added;
// the meaning of an existing one never changes (A8).
type Evidence struct {
	Attempt int    `json:"attempt,omitempty"` // from 1; 0: none was started
	Source  Source `json:"source,omitempty"`

	// The markers of CONTRACT F3: diagnosis, never proof.
	DispatchStarted         bool `json:"dispatch_started"`
	RequestHeadersSent      bool `json:"request_headers_sent"`
	RequestComplete         bool `json:"request_complete"`
	ResponseHeadersReceived bool `json:"response_headers_received"`
	ResponseComplete        bool `json:"response_complete"`

	Stage    Stage     `json:"stage,omitempty"`    // last completed setup stage (E2)
	Attempts []Attempt `json:"attempts,omitempty"` // every try (E7)

	DispatchSequence uint64 `json:"dispatch_sequence,omitempty"` // journal sequence of DISPATCH_STARTED
	ResultSequence   uint64 `json:"result_sequence,omitempty"`   // journal sequence of RESULT_COMMITTED
	ConnectionID     string `json:"connection_id,omitempty"`
	ConnectionReused bool   `json:"connection_reused,omitempty"`
	Peer             *Peer  `json:"peer,omitempty"` // E6

	Fingerprint string `json:"fingerprint,omitempty"` // "sha256:…", recognises repeats (O3)
	Snapshot    string `json:"snapshot,omitempty"`    // digest of the route snapshot (D1)
	Route       string `json:"route,omitempty"`

	ReceivedStatus int    `json:"received_status,omitempty"`
	StatusLine     string `json:"status_line,omitempty"` // of a malformed answer, length-capped
	ReceivedBytes  *int64 `json:"received_bytes,omitempty"`
	ExpectedBytes  *int64 `json:"expected_bytes,omitempty"`
	Framing        string `json:"framing,omitempty"` // how the body was delimited and ended
	ResponseDigest string `json:"response_digest,omitempty"`
	Redacted       int    `json:"redacted,omitempty"`       // places at which a secret was masked (C5)
	ProtocolProof  string `json:"protocol_proof,omitempty"` // the frame or alert of G8

	Hop                 string `json:"hop,omitempty"`                   // who answered, where not the origin (G10)
	HopStatus           int    `json:"hop_status,omitempty"`            // what that hop answered about its own attempt (G10)
	ReceivedProxyStatus string `json:"received_proxy_status,omitempty"` // G10

	// Of a command over SSH (G9).
	ExitStatus     *int   `json:"exit_status,omitempty"`
	ExitSignal     string `json:"exit_signal,omitempty"`
	OutputComplete *bool  `json:"output_complete,omitempty"` // both streams came to their end, and all of it is kept
	Truncated      bool   `json:"truncated,omitempty"`       // the output outgrew the limit and was not kept from there on
	ChannelClosed  *bool  `json:"channel_closed,omitempty"`  // by the server
	StdoutBytes    *int64 `json:"stdout_bytes,omitempty"`
	StderrBytes    *int64 `json:"stderr_bytes,omitempty"`
	StdoutDigest   string `json:"stdout_digest,omitempty"`
	StderrDigest   string `json:"stderr_digest,omitempty"`
	Stdin          string `json:"stdin,omitempty"`        // "whole", or "streamed": then no fingerprint covers it
	StdinDigest    string `json:"stdin_digest,omitempty"` // of what was handed over
	// Carried is what passed after a 101, once that is over (G4).
	Carried *Carried `json:"carried,omitempty"`

	LocalCause    string       `json:"local_cause,omitempty"`    // F5
	Field         string       `json:"field,omitempty"`          // B2: what the caller can correct
	Reason        string       `json:"reason,omitempty"`         // fixed token, e.g. authority_mismatch
	EarlierAction string       `json:"earlier_action,omitempty"` // O3, H3
	Idempotency   *Idempotency `json:"idempotency,omitempty"`
	// RetryBudget is absent on routes where Waybill makes no repeats by itself (J4).
	RetryBudget *RetryBudget `json:"retry_budget,omitempty"`
	Generation  int          `json:"generation,omitempty"`  // of the last lease, from 2 (J1)
	Conditional string       `json:"conditional,omitempty"` // precondition that the service enforces (I7)
	Durability  string       `json:"durability,omitempty"`  // "relaxed" where F1 is waived
	Recovered   bool         `json:"recovered,omitempty"`   // projected after a restart (M4)
	Running     bool         `json:"running,omitempty"`     // the attempt still runs

	Resolutions []Resolution `json:"resolutions,omitempty"` // later evidence (K3)
	Queries     int          `json:"queries,omitempty"`     // how often the remote side was asked
	Job         *Job         `json:"job,omitempty"`         // A7
	Items       *Items       `json:"items,omitempty"`       // F7
	LinkedTo    string       `json:"linked_to,omitempty"`   // the action that this one was started for
	LinkKind    string       `json:"link_kind,omitempty"`   // why: reconcile, job, poll
	Approval    *Approval    `json:"approval,omitempty"`    // D3, D4: a person was asked
}

// Approval is what is told of a person's approval. It does not name the person.
type Approval struct {
	State       string `json:"state"`                 // pending, approved, denied, expired, spent, closed
	Fingerprint string `json:"fingerprint,omitempty"` // of everything that would be sent but the secret (D5)
	ExpiresAt   string `json:"expires_at,omitempty"`  // RFC 3339
	Reason      string `json:"reason,omitempty"`      // the words of the person who decided
}

// Carried counts the bytes of an upgraded connection. It says nothing of what they did.
type Carried struct {
	BytesOut int64 `json:"bytes_out"` // from the caller
	BytesIn  int64 `json:"bytes_in"`  // to the caller
}

// Attempt is one try of an action (CONTRACT E7, A9).
type Attempt struct {
	N       int     `json:"n"`
	Stage   Stage   `json:"stage,omitempty"`
	Outcome Outcome `json:"outcome"`
	Code    Code    `json:"code,omitempty"`
}

// Peer is the verified identity of the far end of a connection (CONTRACT E6).
type Peer struct {
	Address     string `json:"address,omitempty"`
	ServerName  string `json:"server_name,omitempty"` // SNI
	Protocol    string `json:"protocol,omitempty"`    // "http/1.1", "h2"
	TLSVersion  string `json:"tls_version,omitempty"`
	LeafDigest  string `json:"leaf_digest,omitempty"`  // "sha256:…" of the DER leaf
	ChainDigest string `json:"chain_digest,omitempty"` // "sha256:…" over the verified chain
	HostKey     string `json:"host_key,omitempty"`     // SSH fingerprint
	// Proxy is the upstream proxy the connection was tunnelled through; Address is its own.
	Proxy string `json:"proxy,omitempty"`
}

// Idempotency is what is recorded of a remote key contract (CONTRACT I2).
type Idempotency struct {
	Key            string `json:"key,omitempty"`
	Scope          string `json:"scope,omitempty"`
	Fingerprint    string `json:"fingerprint,omitempty"`
	RemoteContract string `json:"remote_contract,omitempty"`
	// Maker is "caller" or "waybill"; ExpiresAt the end of the window for repeats (I5).
	Maker     string `json:"maker,omitempty"`
	ExpiresAt string `json:"expires_at,omitempty"` // RFC 3339
}

// RetryBudget is what an action's budget allows and what was used of it (CONTRACT J4).
type RetryBudget struct {
	Attempts  int    `json:"attempts"`
	Used      int    `json:"used"`
	Until     string `json:"until,omitempty"` // RFC 3339
	Exhausted bool   `json:"exhausted"`
}
