package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

const (
	startLimit = 60 * time.Second
	stopLimit  = 15 * time.Second
)

// process is a child that this program started and ends, by its id.
type process struct {
	cmd    *exec.Cmd
	log    string // file of its output
	exited chan struct{}
	err    error
	// signal is where stop sends SIGTERM to, if not to the child itself.
	signal func() int
}

// childEnv is what a child gets of the environment: what a program needs to start,
// and nothing that could change what is measured.
func childEnv(more ...string) []string {
	var env []string
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "LANG", "TZ", "GOCOVERDIR"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return append(env, more...)
}

// startProcess starts a program. ready is called with its standard output: it
// returns when the program can be used. A nil ready does not read it.
func startProcess(ctx context.Context, log, dir string, env []string, ready func(io.Reader) error, path string, args ...string) (*process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	defer func() { _ = out.Close() }()
	cmd := exec.Command(path, args...)
	cmd.Dir, cmd.Env, cmd.Stderr = dir, env, out
	// A group of its own: an interrupt at the terminal reaches the driver only, which
	// then ends its children in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var stdout io.ReadCloser
	if ready != nil {
		if stdout, err = cmd.StdoutPipe(); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
	} else {
		cmd.Stdout = out
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	p := &process{cmd: cmd, log: log, exited: make(chan struct{})}
	drained := make(chan struct{})
	isReady := make(chan error, 1)
	go func() {
		defer close(drained)
		if ready != nil {
			isReady <- ready(stdout)
			_, _ = io.Copy(io.Discard, stdout)
		}
	}()
	go func() {
		<-drained // Wait closes the pipe
		p.err = cmd.Wait()
		close(p.exited)
	}()
	if ready == nil {
		return p, nil
	}
	select {
	case err = <-isReady:
		if err == nil {
			return p, nil
		}
	case <-time.After(startLimit):
		err = errors.New("not ready in time")
	case <-ctx.Done():
		err = ctx.Err()
	}
	p.stop()
	return nil, fmt.Errorf("bench: %s: %w\n%s", path, err, tail(log))
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// stop ends the process in good order, and at once when it does not.
func (p *process) stop() {
	pid := p.pid()
	if p.signal != nil {
		pid = p.signal()
	}
	if pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGTERM)
	}
	select {
	case <-p.exited:
	case <-time.After(stopLimit):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}

// alive reports whether the process still runs.
func (p *process) alive() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// tail is the end of a log, for an error text.
func tail(name string) string {
	b, err := os.ReadFile(name)
	if err != nil {
		return ""
	}
	return string(b[max(0, len(b)-2000):])
}

// firstLine reads one line as readiness.
func firstLine(into *string) func(io.Reader) error {
	return func(r io.Reader) error {
		line, err := bufio.NewReader(r).ReadString('\n')
		*into = strings.TrimSpace(line)
		return err
	}
}

// listening waits until somebody accepts on the address, or p has ended.
func listening(ctx context.Context, addr string, p *process) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			_ = c.Close()
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-p.exited:
			return fmt.Errorf("bench: ended at its start: %w\n%s", p.err, tail(p.log))
		case <-ctx.Done():
			return fmt.Errorf("bench: %s does not answer: %w\n%s", addr, ctx.Err(), tail(p.log))
		}
	}
}

// freePort returns a port of loopback that was free a moment ago.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	defer func() { _ = l.Close() }()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}
