package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"waybill/journal"
)

// checkData looks at the data folder, its file system, its syncs and its space.
func (d *doctor) checkData() {
	at := existing(d.data)
	st, err := os.Stat(d.data)
	switch {
	case noFile(err):
		d.add("data", findingOK, "", "%s does not exist yet; the first start makes it below %s", d.data, at)
	case err != nil:
		d.add("data", findingFail, "choose another with --data or WAYBILL_DATA", "%s", err.Error())
		return
	case !st.IsDir():
		d.add("data", findingFail, "choose another with --data or WAYBILL_DATA", "%s is not a folder", d.data)
		return
	case st.Mode().Perm()&0o077 != 0:
		d.add("data", findingFail, "chmod 700 "+d.data, "%s has mode %#o, which lets other users in: it holds the keys of the journal and of the CA", d.data, st.Mode().Perm())
	default:
		d.add("data", findingOK, "", "%s, mode %#o", d.data, st.Mode().Perm())
	}

	if err := journal.CheckFilesystem(at); err != nil {
		status := findingFail
		if d.anyFS {
			status = findingWarn
		}
		d.add("filesystem", status, "put the data folder on ext4 or XFS (--data, WAYBILL_DATA), in a container on a volume; to try things out: --"+allowAnyFilesystem, "%s", err.Error())
	} else {
		d.add("filesystem", findingOK, "", "a sync is a promise there")
	}
	d.checkSync(at)

	free, err := journal.FreeBytes(at)
	switch {
	case err != nil:
		d.add("space", findingFail, "choose another data folder", "%s", err.Error())
	case free < journal.SpaceReserve:
		d.add("space", findingFail, "make room, or choose another data folder", "%d MiB free: below %d MiB new requests are refused (JOURNAL_UNAVAILABLE)", free>>20, journal.SpaceReserve>>20)
	case free < 1<<30:
		d.add("space", findingWarn, "make room, or lower journal.max_size and journal.retention", "%d MiB free; below %d MiB new requests are refused", free>>20, journal.SpaceReserve>>20)
	default:
		d.add("space", findingOK, "", "%.1f GiB free", float64(free)/(1<<30))
	}
}

// Limits of the measurement of syncs.
const (
	syncTries   = 40
	syncBudget  = 2 * time.Second
	syncSlow    = 20 * time.Millisecond
	syncTooFast = 15 * time.Microsecond // no medium does that
)

// checkSync measures what each request waits for twice (DESIGN section 6).
func (d *doctor) checkSync(dir string) {
	const fix = "let the user of Waybill write there, or choose another data folder"
	f, err := os.CreateTemp(dir, ".waybill-doctor-")
	if err != nil {
		d.add("sync", findingFail, fix, "%s", err.Error())
		return
	}
	defer func() {
		_ = f.Close()
		_ = os.Remove(f.Name())
	}()
	block := make([]byte, 4096)
	var took []time.Duration
	for begin := time.Now(); len(took) < syncTries && time.Since(begin) < syncBudget; {
		if _, err := f.Write(block); err != nil {
			d.add("sync", findingFail, "see to the disk", "a write failed: %s", err.Error())
			return
		}
		at := time.Now()
		if err := f.Sync(); err != nil {
			d.add("sync", findingFail, "see to the disk: what is acknowledged there may be lost", "a sync failed: %s", err.Error())
			return
		}
		took = append(took, time.Since(at))
	}
	slices.Sort(took)
	median, slowest := took[len(took)/2], took[len(took)-1]
	text := fmt.Sprintf("a sync takes %v (median of %d, slowest %v); a request waits for two", median.Round(time.Microsecond), len(took), slowest.Round(time.Microsecond))
	switch {
	case strings.Contains(d.a.getenv("LD_PRELOAD"), "eatmydata"):
		d.add("sync", findingFail, "take it out of LD_PRELOAD", "LD_PRELOAD names libeatmydata, which makes syncs do nothing")
	case median > syncSlow:
		d.add("sync", findingWarn, "use a faster disk for the data folder: SSD, no network storage", "%s", text)
	case median < syncTooFast:
		d.add("sync", findingWarn, "make sure that the storage keeps what it acknowledged over a power cut", "%s: faster than a disk can be", text)
	default:
		d.add("sync", findingOK, "", "%s", text)
	}
}

func (d *doctor) checkClock() {
	now := time.Now()
	const fix = "set the clock (chrony, systemd-timesyncd); certificates and retention depend on it"
	newest, name := time.Time{}, ""
	look := func(path string) {
		if st, err := os.Stat(path); err == nil && st.ModTime().After(newest) {
			newest, name = st.ModTime(), path
		}
	}
	if exe, err := os.Executable(); err == nil {
		look(exe)
	}
	_ = filepath.WalkDir(d.data, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			look(path)
		}
		return nil
	})
	switch synced, known := clockSynchronised(); {
	case newest.After(now.Add(2 * time.Minute)):
		d.add("clock", findingFail, fix, "it is %s, and %s was written at %s: the clock went back", now.UTC().Format(time.RFC3339), name, newest.UTC().Format(time.RFC3339))
	case known && !synced:
		d.add("clock", findingWarn, fix, "%s; the kernel says that nothing keeps the clock right", now.UTC().Format(time.RFC3339))
	default:
		d.add("clock", findingOK, "", "%s", now.UTC().Format(time.RFC3339))
	}
}

// checkListeners asks the running proxy's ports, or whether they could be had.
func (d *doctor) checkListeners() {
	if d.status != nil {
		for _, l := range [][2]string{{"proxy", d.status.Proxy}, {"ssh", d.status.SSH}, {"metrics", d.status.Metrics}} {
			what, addr := l[0], l[1]
			if addr == "" {
				continue
			}
			conn, err := net.DialTimeout("tcp", reachable(addr), 3*time.Second)
			if err != nil {
				d.add("ports", findingFail, "see whether a packet filter or a network namespace stands between", "the running proxy says it listens at %s, but nothing answers there", addr)
				continue
			}
			_ = conn.Close()
			d.add("ports", findingOK, "", "the running proxy answers at %s (%s)", addr, what)
		}
		return
	}
	want := [][2]string{{"listen.proxy", defaultProxyListen}, {"listen.metrics", defaultMetricsListen}}
	admin := ""
	if d.cfg != nil {
		want[0][1] = firstOf(d.cfg.proxyListen, want[0][1])
		want[1][1] = firstOf(d.cfg.metricsListen, want[1][1])
		admin = d.cfg.adminListen
		if d.cfg.snapshot.HasSSH() || d.cfg.sshListen != "" {
			want = append(want, [2]string{"listen.ssh", firstOf(d.cfg.sshListen, defaultSSHListen)})
		}
	}
	for _, w := range want {
		if w[1] == listenNothing {
			continue
		}
		l, err := net.Listen("tcp", w[1])
		if err != nil {
			d.add("ports", findingFail, "stop the program that listens there, or choose another address in "+w[0], "%s: %s", w[0], err.Error())
			continue
		}
		_ = l.Close()
		d.add("ports", findingOK, "", "%s %s is free", w[0], w[1])
	}
	path, err := d.a.adminPath(d.data, admin)
	switch {
	case err != nil:
		d.add("ports", findingFail, "write unix:PATH", "%s", err.Error())
	case len(path) > 107:
		d.add("ports", findingFail, "choose a shorter --data, or --admin unix:PATH", "the admin socket's path %s has %d bytes; 107 are possible", path, len(path))
	}
}

// checkVariables looks for settings that lead around the proxy, or make clients trust
// something else. Values are not shown where they may hold a password.
func (d *doctor) checkVariables() {
	env := d.a.getenv
	before := len(d.doc.Findings)
	const check, fix = "variables", `"waybill run" sets them right for one program, eval "$(waybill env)" for a shell`
	for _, pair := range [][2]string{{"http_proxy", "HTTP_PROXY"}, {"https_proxy", "HTTPS_PROXY"}, {"no_proxy", "NO_PROXY"}} {
		low, up := env(pair[0]), env(pair[1])
		if low != "" && up != "" && low != up {
			d.add(check, findingWarn, fix, "%s and %s differ: programs read one or the other", pair[0], pair[1])
		}
	}
	want := firstOf(d.proxyAddress(), defaultProxyListen)
	for _, name := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"} {
		if v := env(name); v != "" && !sameAddress(v, want) {
			d.add(check, findingWarn, fix+`; where the other proxy is needed to get out, that is upstream.proxy of the routes`, "%s names another proxy: %s", name, hostOf(v))
			break
		}
	}
	if v := firstOf(env("ALL_PROXY"), env("all_proxy")); v != "" && !sameAddress(v, want) {
		d.add(check, findingWarn, fix, "ALL_PROXY names another proxy: %s", hostOf(v))
	}
	noProxy := firstOf(env("NO_PROXY"), env("no_proxy"))
	if noProxy == "*" {
		d.add(check, findingWarn, fix, "NO_PROXY is *: nothing goes through the proxy")
	} else if d.cfg != nil {
		facts := configFacts{snapshot: d.cfg.snapshot}
		for name := range strings.SplitSeq(noProxy, ",") {
			if name = strings.TrimPrefix(strings.TrimSpace(name), "."); name != "" && facts.routed(name) {
				d.add(check, findingWarn, fix, "NO_PROXY names %s, which a route takes: its requests would slip past", name)
			}
		}
	}
	if env("NODE_TLS_REJECT_UNAUTHORIZED") == "0" {
		d.add(check, findingWarn, "unset it; NODE_EXTRA_CA_CERTS is enough", "NODE_TLS_REJECT_UNAUTHORIZED=0: Node trusts everybody")
	}
	if env("GIT_SSL_NO_VERIFY") != "" {
		d.add(check, findingWarn, "unset it; GIT_SSL_CAINFO is enough", "GIT_SSL_NO_VERIFY is set: git trusts everybody")
	}
	if env("SSLKEYLOGFILE") != "" {
		d.add(check, findingWarn, "unset it", "SSLKEYLOGFILE is set: programs write the keys of their TLS sessions into a file")
	}
	if err := checkDebugSettings(env("GODEBUG")); err != nil {
		d.add(check, findingFail, "take it out of GODEBUG", "%s", err.Error())
	}
	for _, name := range slices.Concat(replacingCA, addingCA) {
		if path := env(name); path != "" {
			if _, err := os.Stat(path); err != nil {
				d.add(check, findingWarn, "unset it, or put the file back", "%s names a file that cannot be read", name)
			}
		}
	}
	d.checkGitConfig(check)
	if len(d.doc.Findings) == before {
		if env("HTTPS_PROXY") == "" && env("https_proxy") == "" {
			d.add(check, findingOK, "", "none is set: programs of this shell do not use the proxy; start them with \"waybill run --\", or eval \"$(waybill env)\"")
			return
		}
		d.add(check, findingOK, "", "programs of this shell use the proxy at %s", want)
	}
}

// checkGitConfig looks for settings of git that win over variables.
func (d *doctor) checkGitConfig(check string) {
	git, err := exec.LookPath("git")
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, git, "config", "--name-only", "--get-regexp", `^(http\..*(proxy|sslverify|sslcainfo)|remote\..*\.proxy)$`)
	cmd.Env = d.a.environ
	if d.cfg != nil {
		cmd.Env = (&builtEnv{Unset: d.cfg.credentials.EnvNames()}).Environ(d.a.environ) // no secret is its business (C2)
	}
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return
	}
	for name := range strings.Lines(string(out)) {
		name = strings.TrimSpace(name)
		if name == "" || strings.ContainsAny(name, "@") { // a URL in a key may hold a password
			name = "http.<url>.*"
		}
		d.add(check, findingWarn, "git config --unset "+name+" (with --global where it is there)", "git's setting %s wins over the variables", name)
	}
}

func (d *doctor) proxyAddress() string {
	switch {
	case d.status != nil:
		return reachable(d.status.Proxy)
	case d.cfg != nil && d.cfg.proxyListen != "":
		return reachable(d.cfg.proxyListen)
	}
	return ""
}

// hostOf is the address in a proxy variable, without user and password.
func hostOf(v string) string {
	if !strings.Contains(v, "://") {
		v = "http://" + v
	}
	u, err := url.Parse(v)
	if err != nil || u.Host == "" {
		return "not an address"
	}
	return u.Host
}

func sameAddress(v, want string) bool {
	host, port, err := net.SplitHostPort(hostOf(v))
	whost, wport, werr := net.SplitHostPort(want)
	if err != nil || werr != nil {
		return false
	}
	local := func(h string) bool { return h == "localhost" || net.ParseIP(h) != nil && net.ParseIP(h).IsLoopback() }
	return port == wport && (host == whost || local(host) && local(whost))
}
