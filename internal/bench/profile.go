package bench

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// profileVariable names the socket on which a profiling build answers. Only that
// build knows it: see BuildProfiled.
const profileVariable = "WAYBILL_BENCH_PPROF"

//go:embed profilehook.go.txt
var profileHook []byte

// BuildProfiled builds Waybill from source with one more file in package main, which
// opens net/http/pprof on a Unix socket. The file exists in the build's overlay only:
// no other build, and no build tag, can bring the listener into the product.
func BuildProfiled(ctx context.Context, source, out string) error {
	dir, err := os.MkdirTemp("", "wbb")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if source, err = filepath.Abs(source); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	hook := filepath.Join(dir, "hook.go")
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(source, "cmd", "waybill", "zz_bench_pprof.go"): hook}})
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := errors.Join(os.WriteFile(hook, profileHook, 0o600), os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600)); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", out, "./cmd/waybill")
	cmd.Dir = source
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("bench: build with the profiling hook: %w\n%s", err, text)
	}
	return nil
}

// Profile runs Waybill (strict; o.Waybill must be of BuildProfiled) with the mode and size of
// what at each number of clients and writes cpu, allocs, mutex and block profiles into out.
func Profile(ctx context.Context, o Options, what Scenario, clients []int, out string) error {
	if err := o.defaults(); err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o700); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	d, err := newDriver(ctx, o)
	if err != nil {
		return err
	}
	defer d.close()
	socket := filepath.Join(d.rig.dir, "pprof.sock")
	if err := os.Setenv(profileVariable, socket); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	run, err := d.rig.startWaybill(ctx, "p", "", false, nil)
	if err != nil {
		return err
	}
	d.live["waybill"] = run
	target := originHost + ":443"
	if what.Mode == Absolute {
		target = originHost + ":80"
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var nd net.Dialer
		return nd.DialContext(ctx, "unix", socket)
	}}}
	for _, n := range clients {
		what.Clients = n
		l := Load{Scenario: what, Proxy: run.proxy, Authority: target, RootCA: run.ca,
			Warmup: o.Warmup, Window: o.Window, PID: run.measure, Metrics: run.metrics, Origin: d.rig.origin.Stats}
		type loaded struct {
			s   *Sample
			err error
		}
		done := make(chan loaded, 1)
		go func() {
			s, err := d.load(ctx, l)
			done <- loaded{s, err}
		}()
		settle(ctx, o.Warmup+200*time.Millisecond)
		name := fmt.Sprintf("%s-c%d", what.Mode, n)
		seconds := max(1, int((o.Window-300*time.Millisecond)/time.Second))
		perr := fetch(ctx, client, fmt.Sprintf("profile?seconds=%d", seconds), filepath.Join(out, name+"-cpu.pprof"))
		for _, kind := range []string{"allocs", "mutex", "block", "heap"} {
			perr = errors.Join(perr, fetch(ctx, client, kind, filepath.Join(out, name+"-"+kind+".pprof")))
		}
		r := <-done
		if err := errors.Join(perr, r.err); err != nil {
			return err
		}
		d.say("%s: %d requests, p50 %v, CPU %v per 1,000 requests, %d errors", name, r.s.Requests, r.s.P50.Round(time.Microsecond),
			(time.Duration(float64(r.s.CPU) / float64(max(1, r.s.Requests)) * 1000)).Round(time.Millisecond), r.s.Errors)
	}
	return nil
}

func fetch(ctx context.Context, c *http.Client, what, file string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://bench/debug/pprof/"+what, nil)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	resp, err := c.Do(req)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("bench: %s: status %d", what, resp.StatusCode)
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	_, err = io.Copy(f, resp.Body)
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}
