package dispatch

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/routes"
)

// A handshake is no other request: it is not kept to be repeated without its connection,
// its fingerprint is its own, and it goes over HTTP/1.1 wherever it goes (D1, I3).
func TestHandshakeIsItsOwnRequest(t *testing.T) {
	contract.Covers(t, "D1", "I3")
	out := Outgoing{Method: http.MethodGet, Target: routes.Target{Scheme: "https", Host: "ws.example.test", Port: 443}, Authority: "ws.example.test", RawPath: "/", Header: http.Header{}}
	shake := out
	shake.Upgrade = protocolWebSocket
	if fingerprint(&out, nil) == fingerprint(&shake, nil) {
		t.Error("a handshake and a plain request have one fingerprint")
	}
	a := &action{out: &shake, route: &routes.Route{Contract: routes.Contract{Retry: &routes.Retry{Background: true}}},
		s: &Submission{Method: http.MethodGet, Header: http.Header{}}, binding: &Binding{}}
	if kept, err := a.keeping(); kept != nil || err != nil {
		t.Errorf("kept: %q %v", kept, err)
	}
	if !a.order(shake.Target, time.Second).HTTP1 {
		t.Error("a connection that may speak HTTP/2")
	}
	a.out = &out
	if kept, err := a.keeping(); kept == nil || err != nil {
		t.Errorf("a plain request is not kept: %v", err)
	}
	if a.order(out.Target, time.Second).HTTP1 {
		t.Error("HTTP/1.1 for a plain request")
	}
}

// brokenPipe is an origin's connection whose reader panics.
type brokenPipe struct {
	once sync.Once
	shut chan struct{}
}

func (*brokenPipe) Read([]byte) (int, error)    { panic("what a library did not expect") }
func (*brokenPipe) Write(p []byte) (int, error) { return len(p), nil }
func (p *brokenPipe) Close() error              { p.once.Do(func() { close(p.shut) }); return nil }

// A panic while a connection is carried ends that connection and is on record; the
// process, and every other action, goes on (C2).
func TestPanicEndsTheUpgradeAlone(t *testing.T) {
	contract.Covers(t, "C2")
	b := newBench(t)
	pipe := &brokenPipe{shut: make(chan struct{})}
	u := &Upgraded{a: &action{p: b.Pipeline, out: &Outgoing{Idle: time.Minute}}, pipe: pipe, over: make(chan struct{}), done: make(chan struct{})}
	near, far := net.Pipe()
	ended := make(chan error)
	go func() {
		_, err := io.ReadAll(far)
		ended <- err
	}()
	u.Carry(near)
	if err := <-ended; err != nil && !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
	select {
	case <-pipe.shut:
	default:
		t.Error("the origin's connection is open")
	}
	<-u.done
}
