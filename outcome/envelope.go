package outcome

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
	// Error is nil for an action that succeeded.
	Error *Error `json:"error,omitempty"`
	// Message repeats Error.Message for clients that look at the top level (L8).
	Message  string   `json:"message,omitempty"`
	Evidence Evidence `json:"evidence"`
}

// Error carries the facts and one text for people (CONTRACT L1, L2).
type Error struct {
	Code    Code    `json:"code"`
	Phase   Phase   `json:"phase"`
	Outcome Outcome `json:"outcome"`
	Retry   Retry   `json:"retry"`
	Message string  `json:"message"` // first sentence is the instruction (L8); never parsed
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
	ProtocolProof  string `json:"protocol_proof,omitempty"` // the frame or alert of G8

	Hop                 string `json:"hop,omitempty"`                   // who answered, where not the origin (G10)
	ReceivedProxyStatus string `json:"received_proxy_status,omitempty"` // G10

	LocalCause    string       `json:"local_cause,omitempty"`    // F5
	Field         string       `json:"field,omitempty"`          // B2: what the caller can correct
	Reason        string       `json:"reason,omitempty"`         // fixed token, e.g. authority_mismatch
	EarlierAction string       `json:"earlier_action,omitempty"` // O3, H3
	Idempotency   *Idempotency `json:"idempotency,omitempty"`
	Durability    string       `json:"durability,omitempty"` // "relaxed" where F1 is waived
	Recovered     bool         `json:"recovered,omitempty"`  // projected after a restart (M4)
	Running       bool         `json:"running,omitempty"`    // the attempt still runs
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
}

// Idempotency is what is recorded of a remote key contract (CONTRACT I2).
type Idempotency struct {
	Key            string `json:"key,omitempty"`
	Scope          string `json:"scope,omitempty"`
	Fingerprint    string `json:"fingerprint,omitempty"`
	RemoteContract string `json:"remote_contract,omitempty"`
}
