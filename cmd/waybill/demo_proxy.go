package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"waybill/internal/control"
)

// demoProxy is the real program: "waybill serve" as a process of its own, so that
// the demo can kill it.
type demoProxy struct {
	dir    string // holds waybill.yaml, secret, upstream-ca.pem, data/, proxy.log
	meters string // address of its metrics
	listen string // fixed after the first start, so that callers find it again
	child  *exec.Cmd
	exited chan error
	admin  *adminClient
}

// demoStartLimit bounds one start of the proxy.
const demoStartLimit = 15 * time.Second

func newDemoSecret() string { return "demo-secret-" + rand.Text() }

// writeDemoFiles writes the configuration that the demo runs with.
func writeDemoFiles(dir, secret string, u *demoUpstreams) error {
	files := map[string]string{
		"secret":          secret + "\n",
		"upstream-ca.pem": string(u.rootPEM),
		"ssh_key":         string(u.ssh.key),
		"known_hosts":     u.ssh.known,
		"waybill.yaml":    demoConfig(dir, u),
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	return os.Mkdir(filepath.Join(dir, "data"), 0o700)
}

// demoConfig is an ordinary configuration; only upstream.resolve is special, since
// the demo's names exist nowhere.
func demoConfig(dir string, u *demoUpstreams) string {
	var b strings.Builder
	q := func(name string) string { return fmt.Sprintf("%q", filepath.Join(dir, name)) }
	fmt.Fprintf(&b, `version: 1
credentials:
  demo: {from: {file: %s}, label: demo}
  absent: {from: {file: %s}}
  ssh-key: {from: {file: %s}, label: demo}
default: deny
routes:
`, q("secret"), q("never-made"), q("ssh_key"))
	b.WriteString(demoSSHConfig(q, u))
	route := func(name, match, credential, extra, host, addr string) {
		fmt.Fprintf(&b, `  - name: %s
    match: %s
    inject: [{header: Authorization, value: "Bearer ${secret}", credential: %s}]
    upstream: {roots: %s, resolve: {%s: %q}}
%s`, name, match, credential, q("upstream-ca.pem"), host, addr, extra)
	}
	api := "api" + demoZone
	fmt.Fprintf(&b, "  - name: denied\n    match: {host: %s, path: /admin/**}\n    deny: true\n", api)
	route("small", "{host: "+api+", path: /small/**}", "demo", "    limits: {request: 1KiB}\n", api, u.addr[api])
	route("no-secret", "{host: "+api+", path: /no-secret/**}", "absent", "", api, u.addr[api])
	route("impatient", "{host: "+api+", path: /impatient/**}", "demo", "    limits: {timeout: 1s}\n", api, u.addr[api])
	route("payments", "{host: "+api+", methods: [GET, POST], path: /v1/**}", "demo", "", api, u.addr[api])
	for _, name := range []string{"expired", "wrong", "refused"} {
		host := name + demoZone
		route(name, "{host: "+host+"}", "demo", "    limits: {tries: 1}\n", host, u.addr[host])
	}
	return b.String()
}

// start starts the process and waits until it answers on its admin socket.
func (p *demoProxy) start(ctx context.Context) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(p.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	data := filepath.Join(p.dir, "data")
	child := exec.Command(exe, append([]string{
		"serve", "--ssh", "127.0.0.1:0", "--config", filepath.Join(p.dir, "waybill.yaml"), "--data", data,
		"--proxy", p.listen, "--metrics", p.meters, "--log-level", "debug", "--log-format", "json",
	}, unsafeStorageFlags...)...)
	child.Args[0] = "waybill"
	// Nothing of the person's environment but what a program needs to start.
	child.Env = demoEnviron(os.Environ())
	child.Stdout, child.Stderr = log, log
	if err := child.Start(); err != nil {
		return err
	}
	p.child, p.exited = child, make(chan error, 1)
	go func() { p.exited <- child.Wait() }()

	ctx, cancel := context.WithTimeout(ctx, demoStartLimit)
	defer cancel()
	for {
		admin, err := dialAdmin(ctx, filepath.Join(data, "admin.sock"))
		if err == nil {
			st, err := admin.status(ctx)
			if err == nil && st.Proxy != "" && st.PID == child.Process.Pid {
				p.admin, p.listen = admin, st.Proxy
				return nil
			}
			_ = admin.Close()
		}
		select {
		case err := <-p.exited:
			p.exited <- err
			return fmt.Errorf("the proxy ended at its start: %w\n%s", err, p.logTail())
		case <-ctx.Done():
			return fmt.Errorf("the proxy did not start in time: %w\n%s", ctx.Err(), p.logTail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// demoEnviron keeps what a program needs to start, and the settings of a test
// run that make the started binary behave as this one.
func demoEnviron(environ []string) []string {
	var env []string
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		switch name {
		case "PATH", "HOME", "TMPDIR", "LANG", "TZ", "GOCOVERDIR", "GORACE", control.Env:
			env = append(env, kv)
		}
	}
	return env
}

// kill ends the process as a power cut would: SIGKILL, no last words.
func (p *demoProxy) kill() error {
	_ = p.admin.Close()
	if err := p.child.Process.Kill(); err != nil {
		return err
	}
	_ = p.wait() // "signal: killed"
	p.child = nil
	return nil
}

// stop ends the process in good order.
func (p *demoProxy) stop(limit time.Duration) error {
	if p.child == nil {
		return nil
	}
	if p.admin != nil {
		_ = p.admin.Close()
	}
	child := p.child
	p.child = nil
	if err := child.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case err := <-p.exited:
		if err != nil {
			return fmt.Errorf("the proxy ended with %w\n%s", err, p.logTail())
		}
		return nil
	case <-time.After(limit):
		_ = child.Process.Kill()
		_ = p.wait() // "signal: killed"
		return fmt.Errorf("the proxy did not stop within %v", limit)
	}
}

// wait returns how the process ended.
func (p *demoProxy) wait() error { return <-p.exited }

func (p *demoProxy) logPath() string { return filepath.Join(p.dir, "proxy.log") }

// logTail is the end of the proxy's log, for an error text.
func (p *demoProxy) logTail() string {
	const most = 2000
	data, err := os.ReadFile(p.logPath())
	if err != nil {
		return ""
	}
	if len(data) > most {
		data = data[len(data)-most:]
	}
	return string(data)
}

// secretForms are the ways in which a secret may hide in a file.
func secretForms(secret string) [][]byte {
	forms := [][]byte{[]byte(secret), []byte(hex.EncodeToString([]byte(secret)))}
	// Base64 of a longer text holds one of three alignments of the secret.
	for shift := range 3 {
		text := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", shift) + secret))
		forms = append(forms, []byte(text[4:len(text)-4]))
	}
	return forms
}

func holdsSecret(data []byte, secret string) bool {
	for _, form := range secretForms(secret) {
		if bytes.Contains(data, form) {
			return true
		}
	}
	return false
}

// filesWithSecret searches the data folder and the log, which was written at
// debug level. It returns names relative to the demo's folder.
func (p *demoProxy) filesWithSecret(secret string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(p.dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case noFile(err):
			return nil // the store tidies up while we look
		case err != nil:
			return err
		case !d.Type().IsRegular() || path == filepath.Join(p.dir, "secret"):
			return nil
		}
		data, err := os.ReadFile(path)
		if noFile(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if holdsSecret(data, secret) {
			rel, _ := filepath.Rel(p.dir, path)
			found = append(found, rel)
		}
		return nil
	})
	return found, err
}
