package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"waybill/client"
	"waybill/dispatch"
	"waybill/outcome"
)

// maxWaitSeconds bounds one wait of get_action: hosts give up on calls that last longer.
const maxWaitSeconds = 600

const execMethod = dispatch.MethodExec

// execInput are the arguments of ssh_exec.
type execInput struct {
	Target         string            `json:"target"`
	User           string            `json:"user"`
	Command        string            `json:"command"`
	Argv           []string          `json:"argv"`
	Stdin          string            `json:"stdin"`
	StdinBase64    string            `json:"stdin_base64"`
	Env            map[string]string `json:"env"`
	TimeoutSeconds int               `json:"timeout_seconds"`
	RequestID      string            `json:"request_id"`
	MaxOutputBytes int               `json:"max_output_bytes"`
	UnsafeRepeat   *unsafeRepeat     `json:"unsafe_repeat"`
}

// unsafeRepeat is the visibly unsafe argument of CONTRACT O3.
type unsafeRepeat struct {
	InvocationID string `json:"invocation_id"`
	Reason       string `json:"reason"`
}

// execAnswer is a command that came to its end, as structured content.
type execAnswer struct {
	InvocationID string            `json:"invocation_id"`
	RequestID    string            `json:"request_id,omitempty"`
	Phase        string            `json:"phase"`
	Outcome      string            `json:"outcome"`
	Retry        string            `json:"retry"`
	Code         outcome.Code      `json:"code,omitempty"`
	ExitStatus   *int              `json:"exit_status,omitempty"`
	ExitSignal   string            `json:"exit_signal,omitempty"`
	Stdout       *string           `json:"stdout,omitempty"`
	StdoutBase64 string            `json:"stdout_base64,omitempty"`
	StdoutBytes  int64             `json:"stdout_bytes"`
	Stderr       *string           `json:"stderr,omitempty"`
	StderrBase64 string            `json:"stderr_base64,omitempty"`
	StderrBytes  int64             `json:"stderr_bytes"`
	Offset       int64             `json:"offset,omitempty"`
	NextOffset   int64             `json:"next_offset,omitempty"` // 0: both streams end here
	Submissions  int               `json:"submissions,omitempty"`
	Envelope     *outcome.Envelope `json:"envelope,omitempty"` // of a command that failed
}

func (m *mcpTools) sshExec(ctx context.Context, call *mcp.CallToolRequest, in execInput) (*toolAnswer, error) {
	switch {
	case in.Target == "":
		return nil, badArgument("target", "The target is missing.")
	case in.User == "":
		return nil, badArgument("user", "The user is missing.")
	case (in.Command == "") == (len(in.Argv) == 0):
		return nil, badArgument("command", "Give command or argv.")
	case in.Stdin != "" && in.StdinBase64 != "":
		return nil, badArgument("stdin_base64", "Give stdin or stdin_base64, not both.")
	case in.TimeoutSeconds < 0 || in.TimeoutSeconds > 86400:
		return nil, badArgument("timeout_seconds", "Whole seconds from 1 to 86400.")
	case in.MaxOutputBytes < 0 || in.MaxOutputBytes > maxBodyBytes:
		return nil, badArgument("max_output_bytes", fmt.Sprintf("From 1 to %d.", maxBodyBytes))
	}
	stdin := []byte(in.Stdin)
	if in.StdinBase64 != "" {
		var err error
		if stdin, err = base64.StdEncoding.DecodeString(in.StdinBase64); err != nil {
			return nil, badArgument("stdin_base64", "It is not base64.")
		}
	}
	if in.RequestID == "" {
		in.RequestID = newRequestID()
	}
	opts := []client.CallOption{client.RequestID(in.RequestID)}
	if u := in.UnsafeRepeat; u != nil {
		opts = append(opts, client.UnsafeRepeat(u.InvocationID, u.Reason))
	}
	if in.TimeoutSeconds > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(in.TimeoutSeconds)*time.Second+timeoutGrace)
		defer cancel()
	}
	stop := m.progress(ctx, call, "Sending; request id "+in.RequestID, in.RequestID, "")
	defer stop()
	r, err := m.client.SSHExec(ctx, client.Command{Target: in.Target, User: in.User, Command: in.Command, Argv: in.Argv, Stdin: stdin, Env: in.Env}, opts...)
	if err != nil {
		return nil, m.whole(ctx, err)
	}
	return execResult(r, 0, in.MaxOutputBytes)
}

// execResult shows limit bytes of each stream from offset on.
func execResult(r *client.CommandResult, offset int64, limit int) (*toolAnswer, error) {
	if limit == 0 {
		limit = defaultBodyBytes
	}
	out := execAnswer{
		InvocationID: r.InvocationID, RequestID: r.RequestID, Phase: r.Facts.Phase.String(), Outcome: r.Facts.Outcome.String(), Retry: r.Facts.Retry.String(), Code: r.Facts.Code,
		ExitStatus: r.ExitStatus, ExitSignal: r.ExitSignal, StdoutBytes: int64(len(r.Stdout)), StderrBytes: int64(len(r.Stderr)), Offset: offset, Submissions: r.Submissions,
	}
	// A part may end in the middle of a character and comes in base64 then: both streams go
	// on from the same offset.
	part := func(b []byte) (*string, string) {
		from := min(offset, int64(len(b)))
		to := min(from+int64(limit), int64(len(b)))
		if to < int64(len(b)) {
			out.NextOffset = offset + int64(limit)
		}
		if b = b[from:to]; utf8.Valid(b) {
			s := string(b)
			return &s, ""
		}
		return nil, base64.StdEncoding.EncodeToString(b)
	}
	out.Stdout, out.StdoutBase64 = part(r.Stdout)
	out.Stderr, out.StderrBase64 = part(r.Stderr)
	a := &toolAnswer{}
	var e *client.Error
	if errors.As(r.Err(), &e) {
		out.Envelope, a.failure, a.text = &e.Envelope, true, e.Envelope.Message
	}
	if out.NextOffset > 0 {
		a.text = strings.TrimSpace(fmt.Sprintf("%s This is a part of the output. fetch_result with offset %d goes on.", a.text, out.NextOffset))
	}
	a.structured = out
	return a, nil
}

// followUpInput are the arguments of reconcile and retry_action.
type followUpInput struct {
	InvocationID string `json:"invocation_id"`
}

func (m *mcpTools) reconcile(ctx context.Context, call *mcp.CallToolRequest, in followUpInput) (*toolAnswer, error) {
	if in.InvocationID == "" {
		return nil, badArgument("invocation_id", "The invocation id is missing.")
	}
	stop := m.progress(ctx, call, "Asking about action "+in.InvocationID, "", in.InvocationID)
	defer stop()
	a, err := m.client.Reconcile(ctx, in.InvocationID)
	if err != nil {
		return nil, err
	}
	return record(a), nil
}

func (m *mcpTools) retryAction(ctx context.Context, call *mcp.CallToolRequest, in followUpInput) (*toolAnswer, error) {
	if in.InvocationID == "" {
		return nil, badArgument("invocation_id", "The invocation id is missing.")
	}
	stop := m.progress(ctx, call, "Repeating action "+in.InvocationID, "", in.InvocationID)
	defer stop()
	a, err := m.client.Retry(ctx, in.InvocationID)
	if err != nil {
		return nil, err
	}
	out := record(a)
	out.failure = a.Err() != nil
	return out, nil
}
