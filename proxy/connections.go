package proxy

// Connections is what callers have open at this moment.
type Connections struct {
	Callers int // connections, tunnels included
	Tunnels int // accepted CONNECTs
	SSH     int // sessions of the SSH endpoint: commands that run, or are about to
}

// Connections returns what callers have open at this moment.
func (p *Proxy) Connections() Connections {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := Connections{Tunnels: len(p.tunnels), SSH: int(p.sshSessions.Load())}
	for c := range p.conns {
		if c.tunnel == nil { // the others are the inside of a tunnel
			out.Callers++
		}
	}
	return out
}
