package proxy

import (
	"bytes"
	"fmt"
	"net/http"
	"time"

	"waybill/dispatch"
)

// upgrade answers a handshake with 101 and carries the connection until it ends
// (CONTRACT G4). It takes the caller's connection from net/http and does not return.
func (x *exchange) upgrade(reply *dispatch.Reply) {
	p, u := x.p, reply.Upgraded
	defer func() { _ = u.Close() }()
	_, _, err := http.NewResponseController(x.w.ResponseWriter).Hijack()
	if err != nil {
		x.handOver(err)
		panic(http.ErrAbortHandler)
	}
	x.w.began = true
	c := p.adopt(&tunnel{serving: true}, x.conn.head)
	defer func() { _ = c.Close() }()
	x.leave() // from here on the taken connection counts
	var head bytes.Buffer
	fmt.Fprintf(&head, "HTTP/1.1 %d %s\r\n", reply.Status, http.StatusText(reply.Status))
	if err = reply.Header.Write(&head); err == nil {
		head.WriteString("\r\n")
		_ = c.SetWriteDeadline(time.Now().Add(p.limits.WriteStall))
		_, err = c.Conn.Write(head.Bytes())
		_ = c.SetWriteDeadline(time.Time{})
	}
	x.handOver(err)
	if err == nil {
		u.Carry(c)
	}
	panic(http.ErrAbortHandler)
}

// noUpgrade ends holding back what follows a handshake, before anything but a 101
// answers it, and reports whether the connection must close: what came already is no
// request.
func (x *exchange) noUpgrade() (early bool) {
	if !x.head.upgrade || x.conn.head == nil {
		return false
	}
	x.head.upgrade = false // what comes next may be a handshake of its own
	return x.conn.head.resume()
}

// adopt registers a connection that was taken from net/http as that of t, so that
// Shutdown waits for it and can close it.
func (p *Proxy) adopt(t *tunnel, front *headConn) *tunnelConn {
	c := front.release()
	ended := c.onClose
	c.onClose = func() {
		ended()
		p.mu.Lock()
		delete(p.tunnels, t)
		p.mu.Unlock()
		p.hijacked.add(-1)
	}
	p.hijacked.add(1)
	p.mu.Lock()
	t.conn = c
	p.tunnels[t] = struct{}{}
	p.mu.Unlock()
	return c
}
