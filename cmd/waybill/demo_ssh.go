package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"waybill/outcome"
)

// demoSSH is the SSH server of the demo: in this process, on loopback. It counts what
// commands did in the upstreams' ledger, under the command line.
type demoSSH struct {
	addr  string
	key   []byte // the private key that logs in; the agent never holds it
	known string // a right line for its host, and a wrong one for another
}

const (
	demoSSHHost  = "box" + demoZone
	demoSSHWrong = "otherbox" + demoZone
)

func (u *demoUpstreams) startSSH() error {
	signer := func() (ssh.Signer, []byte, error) {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, nil, err
		}
		block, err := ssh.MarshalPrivateKey(key, "")
		if err != nil {
			return nil, nil, err
		}
		s, err := ssh.NewSignerFromKey(key)
		return s, pem.EncodeToMemory(block), err
	}
	client, private, err := signer()
	if err != nil {
		return err
	}
	host, _, err := signer()
	if err != nil {
		return err
	}
	stranger, _, err := signer()
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	u.listeners = append(u.listeners, l)
	u.ssh = demoSSH{addr: l.Addr().String(), key: private,
		known: knownhosts.Line([]string{demoSSHHost}, host.PublicKey()) + "\n" + knownhosts.Line([]string{demoSSHWrong}, stranger.PublicKey()) + "\n"}
	cfg := &ssh.ServerConfig{PublicKeyCallback: func(_ ssh.ConnMetadata, k ssh.PublicKey) (*ssh.Permissions, error) {
		if string(k.Marshal()) != string(client.PublicKey().Marshal()) {
			return nil, fmt.Errorf("unknown key")
		}
		return nil, nil
	}}
	cfg.AddHostKey(host)
	u.conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			u.mu.Lock()
			u.open[c] = true
			u.mu.Unlock()
			u.conns.Go(func() {
				u.serveSSH(c, cfg)
				_ = c.Close()
				u.mu.Lock()
				delete(u.open, c)
				u.mu.Unlock()
			})
		}
	})
	return nil
}

func (u *demoUpstreams) serveSSH(c net.Conn, cfg *ssh.ServerConfig) {
	conn, chans, reqs, err := ssh.NewServerConn(c, cfg)
	if err != nil {
		return
	}
	go ssh.DiscardRequests(reqs)
	for nc := range chans {
		ch, requests, err := nc.Accept()
		if err != nil {
			break
		}
		for r := range requests {
			var m struct{ Command string }
			if r.Type != "exec" || ssh.Unmarshal(r.Payload, &m) != nil {
				_ = r.Reply(false, nil)
				continue
			}
			u.runSSH(ch, r, m.Command)
		}
	}
	_ = conn.Close()
}

// runSSH plays a command; all but a refused one do what they were asked for first.
func (u *demoUpstreams) runSSH(ch ssh.Channel, r *ssh.Request, command string) {
	word, _, _ := strings.Cut(command, " ")
	if word == "shutdown" {
		_ = r.Reply(false, nil)
		_ = ch.Close()
		return
	}
	u.mu.Lock()
	u.effects[command]++
	u.mu.Unlock()
	_ = r.Reply(true, nil)
	status := uint32(0)
	switch word {
	case "migrate":
		_, _ = io.WriteString(ch, "step 1 done\n")
		status = 23
	case "release":
		_, _ = io.WriteString(ch, "created release 7\n")
		_ = ch.Close() // and no exit status
		return
	default:
		_, _ = io.WriteString(ch, "ok\n")
	}
	_ = ch.CloseWrite()
	_, _ = ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{status}))
	_ = ch.Close()
}

// demoSSHConfig are the routes of the demo's SSH server.
func demoSSHConfig(q func(string) string, u *demoUpstreams) string {
	return fmt.Sprintf(`  - name: ssh
    match: {hosts: [%[1]s, %[2]s]}
    ssh:
      users: [deploy]
      credential: ssh-key
      known_hosts: %[3]s
      commands:
        - exact: uptime
        - argv: [migrate, "*"]
        - argv: [release, "*"]
        - argv: [shutdown, now]
    upstream: {resolve: {%[1]s: %[4]q, %[2]s: %[4]q}}
    limits: {tries: 1}
`, demoSSHHost, demoSSHWrong, q("known_hosts"), u.ssh.addr)
}

// sshCommand plays one command through POST /v1/ssh/exec.
func sshCommand(host string) func(context.Context, *demo, string) (*demoStep, error) {
	return func(ctx context.Context, d *demo, command string) (*demoStep, error) {
		body, err := json.Marshal(map[string]string{"target": host, "user": "deploy", "command": command})
		if err != nil {
			return nil, err
		}
		a := d.caller.send(ctx, http.MethodPost, "http://waybill.internal/v1/ssh/exec", string(body))
		s := &demoStep{answer: a, id: a.ID}
		s.check(!d.caller.sawSecret(string(d.upstreams.ssh.key)), "the private key reached the agent")
		return s, nil
	}
}

// demoSSHScenarios are the lines about commands.
func demoSSHScenarios() []demoScenario {
	return []demoScenario{
		{
			name: "ssh command", story: "logged in with a key that the agent never holds; the exit status is the remote's",
			want: outcome.Success(), status: 200, effects: 1,
			path: "uptime", play: sshCommand(demoSSHHost),
		},
		{
			name: "ssh command that exits 23", story: "a known result; it says nothing of the effects, so it is no permission to repeat",
			want: facts(outcome.RemoteExecution, outcome.Committed, outcome.Reconcile, outcome.CodeRemoteError), status: 200, effects: 1,
			path: "migrate up", play: sshCommand(demoSSHHost),
		},
		{
			name: "ssh closed without an exit status", story: "it ran, and nobody said how it ended: unknown",
			want: facts(outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteResultIncomplete), status: 424, effects: 1,
			path: "release 7", play: sshCommand(demoSSHHost),
		},
		{
			name: "ssh repeat of the unknown command", story: "refused until the caller names the earlier action (WAYBILL_SUPERSEDES)",
			want: facts(outcome.Validation, outcome.NotAttempted, outcome.Reconcile, outcome.CodeDuplicateSuspected), status: 424, effects: 0,
			path: "release 7", play: sshCommand(demoSSHHost),
		},
		{
			name: "ssh host key is not the known one", story: "stopped before the key was offered",
			want: facts(outcome.ConnectionSetup, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeSSHHostKeyRejected), status: 422, effects: 0,
			path: "uptime", play: sshCommand(demoSSHWrong),
		},
		{
			name: "ssh server refuses the command", story: "an authoritative refusal: it did not start",
			want: facts(outcome.RemoteExecution, outcome.Rejected, outcome.AfterCorrection, outcome.CodeExecRefused), status: 403, effects: 0,
			path: "shutdown now", play: sshCommand(demoSSHHost),
		},
	}
}
