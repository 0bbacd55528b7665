package dispatch

import (
	"crypto/sha256"
	"sync"

	"waybill/dispatch/leak"
	"waybill/internal/control"
	"waybill/routes"
)

// MinSearchedBytes is the length of the shortest value that answers are searched for.
const MinSearchedBytes = leak.MinSecretBytes

// maxGuards bounds the guards that are kept: more credentials than that at once are
// rare, and a guard that is not there is made again.
const maxGuards = 32

// guards keeps what was made of a credential's forms for the actions that follow under
// it: making it costs more than searching a small answer. It holds secrets, as the
// credential store does, and forgets them when the configuration changes.
type guards struct {
	mu   sync.Mutex
	made map[[sha256.Size]byte]*leak.Guard
}

// of returns the guard of these secrets.
func (g *guards) of(secrets []string) *leak.Guard {
	if len(secrets) == 0 {
		return nil
	}
	f := newFields()
	f.add(secrets...)
	key := f.sum()
	g.mu.Lock()
	defer g.mu.Unlock()
	if guard, ok := g.made[key]; ok {
		return guard
	}
	list := make([][]byte, len(secrets))
	for i, s := range secrets {
		list[i] = []byte(s)
	}
	guard := leak.New(list...)
	if len(g.made) >= maxGuards || g.made == nil {
		g.made = make(map[[sha256.Size]byte]*leak.Guard)
	}
	g.made[key] = guard
	return guard
}

func (g *guards) forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.made = nil
}

// screen returns the screen of an action with these secrets.
func (p *Pipeline) screen(secrets []string, mode routes.Leak) *screen {
	if control.Off("C5-secrets-masked") {
		return &screen{}
	}
	return &screen{guard: p.guards.of(secrets), block: mode == routes.LeakBlock}
}
