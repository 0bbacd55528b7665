package client

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"

	"waybill/outcome"
)

// Command is one command over SSH. The proxy holds the key, and the route says which
// commands there are.
type Command struct {
	Target string // "host" or "host:port" of an SSH route
	User   string
	// One of the two: the words of the command, or the line as a shell reads it.
	Argv    []string
	Command string
	Stdin   []byte // nil: none
	Env     map[string]string
}

// CommandResult is a command that came to its end, whatever its exit status.
type CommandResult struct {
	// Envelope has the action and the evidence; its Error is that of a non-zero status or a
	// signal (REMOTE_ERROR), nil otherwise.
	Envelope     outcome.Envelope
	InvocationID string
	RequestID    string
	Facts        outcome.Facts
	ExitStatus   *int   // nil: none came
	ExitSignal   string // "" or as SSH names it, "KILL"
	Stdout       []byte
	Stderr       []byte
	// Submissions counts what was sent for the call, this one included; 0 for Output.
	Submissions int
}

// Err returns the *Error of a command that did not end with status 0; nil for a success.
// How much such a command did its status does not tell (CONTRACT F8).
func (r *CommandResult) Err() error {
	if r.Facts.Code == outcome.CodeNone {
		return nil
	}
	return &Error{Envelope: r.Envelope, Source: FromBody, RequestID: r.RequestID}
}

const (
	// CommandOutputType is the media type of a command's stored output; Output reads it.
	CommandOutputType = "application/vnd.waybill.ssh-output"

	execPath     = "/v1/ssh/exec"
	maxExecBytes = 128 << 20 // of the answer as JSON
	frameHead    = 8
	maxFrame     = 32 << 10
)

var errFrame = errors.New("client: the stored output is not understood")

// SSHExec runs one command over SSH. It is Do for commands: the same options, the same
// rules of repeating, the same *Error for everything but a command that came to its end –
// with a status of any value, or a signal: CommandResult.Err. One whose end is not known
// is an *Error, and is not repeated unless the route calls the command repeatable.
func (c *Client) SSHExec(ctx context.Context, cmd Command, opts ...CallOption) (*CommandResult, error) {
	body, err := json.Marshal(struct {
		Target  string            `json:"target"`
		User    string            `json:"user"`
		Command string            `json:"command,omitempty"`
		Argv    []string          `json:"argv,omitempty"`
		Stdin   []byte            `json:"stdin_base64,omitempty"`
		Env     map[string]string `json:"env,omitempty"`
	}{cmd.Target, cmd.User, cmd.Command, cmd.Argv, cmd.Stdin, cmd.Env})
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+apiHost+execPath, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req, opts...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	r := &CommandResult{InvocationID: resp.InvocationID, RequestID: resp.RequestID, Facts: resp.Facts, Submissions: resp.Submissions}
	// From here on the command has ended: what fails is only the reading of it.
	read := func(from *Response) (*CommandResult, error) {
		if _, err := c.readOutput(ctx, from, r); err != nil {
			return nil, c.ended(resp, err)
		}
		return r, nil
	}
	if resp.Fetched || resp.Replayed != "" {
		return read(resp)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxExecBytes))
	if err != nil {
		return nil, c.ended(resp, err)
	}
	var doc struct {
		ExitStatus *int    `json:"exit_status"`
		ExitSignal string  `json:"exit_signal"`
		Stdout     *string `json:"stdout"`
		StdoutB    []byte  `json:"stdout_base64"`
		Stderr     *string `json:"stderr"`
		StderrB    []byte  `json:"stderr_base64"`
		Result     string  `json:"result"`
	}
	env, ok := decodeEnvelope(raw)
	if err := json.Unmarshal(raw, &doc); err != nil || !ok || resp.InvocationID == "" || env.InvocationID != resp.InvocationID {
		return nil, c.unread(resp, "answer_not_understood", err)
	}
	r.Envelope, r.ExitStatus, r.ExitSignal = env, doc.ExitStatus, doc.ExitSignal
	if doc.Result != "" { // too long for the answer
		stored, err := c.Result(ctx, r.InvocationID)
		if err != nil {
			return nil, c.ended(resp, err)
		}
		defer func() { _ = stored.Body.Close() }()
		return read(stored)
	}
	pick := func(text *string, b []byte) []byte {
		if text != nil {
			return []byte(*text)
		}
		return b
	}
	r.Stdout, r.Stderr = pick(doc.Stdout, doc.StdoutB), pick(doc.Stderr, doc.StderrB)
	return r, nil
}

// Output fetches the stored output of a command, and how it ended. Like Result it executes
// nothing. Of what is no command's output the error wraps ErrNotFound.
func (c *Client) Output(ctx context.Context, id string) (*CommandResult, error) {
	resp, err := c.Result(ctx, id)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || media != CommandOutputType {
		return nil, errors.Join(errFrame, ErrNotFound)
	}
	return c.readOutput(ctx, resp, &CommandResult{InvocationID: id, Facts: resp.Facts})
}

// readOutput fills in what a stored output and its record say.
func (c *Client) readOutput(ctx context.Context, resp *Response, r *CommandResult) (*CommandResult, error) {
	var out, errs bytes.Buffer
	if err := splitOutput(resp.Body, &out, &errs); err != nil {
		var e *Error
		if errors.As(err, &e) {
			return nil, e
		}
		return nil, c.unread(resp, "output_not_understood", err)
	}
	r.Stdout, r.Stderr = out.Bytes(), errs.Bytes()
	if n, err := strconv.Atoi(resp.Header.Get("Waybill-Exit-Status")); err == nil {
		r.ExitStatus = &n
	}
	if s := resp.Header.Get("Waybill-Exit-Signal"); s != "" {
		r.ExitSignal = s
	}
	if r.Envelope.InvocationID == "" {
		a, err := c.Action(ctx, r.InvocationID)
		if err != nil {
			return nil, err
		}
		r.Envelope, r.Facts = *a.Envelope, a.Facts()
		if r.RequestID == "" {
			r.RequestID = a.RequestID
		}
	}
	return r, nil
}

// ended is a failure to read what a command came to: never less than that it was run.
func (c *Client) ended(resp *Response, cause error) *Error {
	var e *Error
	if errors.As(cause, &e) && e.Envelope.InvocationID == resp.InvocationID && e.Facts().Outcome != outcome.NotAttempted {
		return e
	}
	return c.unread(resp, "output_not_read", cause)
}

// unread is a command that ended, and whose output did not arrive here whole.
func (c *Client) unread(resp *Response, reason string, cause error) *Error {
	f := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: resp.Facts.Outcome, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}
	if f.Validate() != nil {
		f = outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}
	}
	e := clientError(resp.RequestID, f, reason, "", cause)
	e.Envelope = outcome.NewEnvelope(resp.InvocationID, f, "", e.Envelope.Evidence)
	return e
}

// splitOutput copies stored output to its two streams: frames, each a head of eight bytes
// – the stream, three zeros, the length in big-endian – and its bytes.
func splitOutput(r io.Reader, stdout, stderr io.Writer) error {
	var head [frameHead]byte
	for {
		_, err := io.ReadFull(r, head[:])
		if err == io.EOF { // itself: a wrapped one is no clean end
			return nil
		}
		if err != nil {
			return err
		}
		n, w := binary.BigEndian.Uint32(head[4:]), stdout
		switch head[0] {
		case 1:
		case 2:
			w = stderr
		default:
			return errFrame
		}
		if head[1]|head[2]|head[3] != 0 || n > maxFrame {
			return errFrame
		}
		if _, err := io.CopyN(w, r, int64(n)); err != nil {
			if err == io.EOF { //nolint:errorlint // as above
				return io.ErrUnexpectedEOF
			}
			return err
		}
	}
}
