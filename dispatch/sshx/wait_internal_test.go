package sshx

import (
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

// answering is a connection that answers requests, or has ended.
type answering struct {
	ssh.Conn
	ended bool
}

func (a answering) SendRequest(string, bool, []byte) (bool, []byte, error) {
	if a.ended {
		return false, nil, io.EOF
	}
	return true, nil, nil
}

func (a answering) Wait() error { return nil }

// TestOrderProvesNothing: at SSH_MSG_DISCONNECT the library ends both streams and closes every
// channel by itself, so that what came before, and in which order, is seen by chance. A status and
// that make no result (G9); a connection that still answers was there, and the end was the peer's.
func TestOrderProvesNothing(t *testing.T) {
	contract.Covers(t, "G9")
	for range 300 {
		for _, ended := range []bool{true, false} {
			near, far := net.Pipe()
			tp := newTap(near)
			s := &session{c: &conn{ssh: answering{ended: ended}, tap: tp}, exited: make(chan struct{}), closed: make(chan struct{})}
			r := &run{s: s, out: &dispatch.Outgoing{Exec: &dispatch.Exec{Grace: time.Minute}}, end: &dispatch.ExecEnd{}, sinkFail: make(chan struct{}), outputEnd: make(chan struct{})}
			close(s.exited)
			close(r.outputEnd)
			close(s.closed)
			if ended {
				_ = tp.Close() // as the library does, on this side
			}
			got := r.wait(t.Context())
			if want := (dispatch.Ending{Complete: true, Framing: framingClosed}); !ended && (got.Complete != want.Complete || got.Framing != want.Framing) {
				t.Fatalf("closed by the peer: %+v", got)
			}
			if ended && (got.Complete || got.Code != outcome.CodeRemoteResultIncomplete || r.end.OutputEnded) {
				t.Fatalf("disconnected: %+v", got)
			}
			_ = near.Close()
			_ = far.Close()
		}
	}
}
