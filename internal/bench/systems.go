package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"waybill/internal/control"
)

// Base is the system that every ratio divides by.
const Base = "goproxy"

// A system is a proxy under test.
type system struct {
	Name string
	What string // how it is set up, for the report
	// absolute and connect are the target as this system is addressed.
	absolute, connect string
	start             func(ctx context.Context, r *rig) (*running, error)
	// absent says why it cannot run here; "": it can.
	absent func() string
	// only says in which scenarios it takes part; nil: in all.
	only func(Scenario) bool
}

// running is a system's process.
type running struct {
	*process
	proxy   string // address
	ca      string // file
	metrics string // URL; "": none
	data    string // folder that grows; "": none
	measure int    // pid whose family is measured
}

// rig is what all systems share: a folder, the origin and the keys.
type rig struct {
	dir, ram    string // ram: a folder in memory; "": there is none
	waybill     string // the binary
	controls    string // a build of it whose protections can be switched off; "": there is none
	env         []string
	compare     map[string]string
	goproxy     string // the binary of ./baseline
	self        string // the driver's own binary
	flags       []string
	secret      string
	origin      *Origin // addresses only
	originCA    string
	proxyCA     string
	proxyKey    string
	proxyCAKey  string // both in one file
	incarnation int
}

// newRig makes the folder's files. The origin is started by the caller.
func newRig(dir string) (*rig, *authority, error) {
	origins, err := newAuthority("waybill bench origins")
	if err != nil {
		return nil, nil, err
	}
	proxies, err := newAuthority("waybill bench proxies")
	if err != nil {
		return nil, nil, err
	}
	key, err := proxies.keyPEM()
	if err != nil {
		return nil, nil, err
	}
	r := &rig{dir: dir, secret: "bench-secret-0123456789abcdef0123456789abcdef"}
	for _, f := range []struct {
		name string
		text []byte
		at   *string
	}{
		{"origin-ca.pem", origins.pem(), &r.originCA}, {"proxy-ca.pem", proxies.pem(), &r.proxyCA}, {"proxy-key.pem", key, &r.proxyKey},
		{"proxy-both.pem", append(bytes.Clone(key), proxies.pem()...), &r.proxyCAKey}, {"secret", []byte(r.secret + "\n"), new(string)},
	} {
		*f.at = filepath.Join(dir, f.name)
		if err := os.WriteFile(*f.at, f.text, 0o600); err != nil {
			return nil, nil, fmt.Errorf("bench: %w", err)
		}
	}
	return r, origins, nil
}

func (r *rig) authorization() string { return "Bearer " + r.secret }

// scratch makes a new folder for one life of a system. Names are short: a socket's
// path has at most 107 bytes.
func (r *rig) scratch(in, name string) (string, error) {
	r.incarnation++
	dir := filepath.Join(in, fmt.Sprintf("%s%d", name, r.incarnation))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	return dir, nil
}

// allSystems returns every system, the base first.
func allSystems(r *rig) []*system {
	always := func() string { return "" }
	abs, con := originHost+":80", originHost+":443"
	all := []*system{
		{Name: Base, What: "bare goproxy v1.9.4 (module internal/bench/baseline): one certificate per host kept, 256 idle upstream connections per host, upstream verified, header set in OnRequest",
			absolute: abs, connect: con, start: startGoproxy, absent: always},
		{Name: "waybill", What: "waybill serve as shipped; route with the defaults (durability strict), log at info to a file",
			absolute: abs, connect: con, start: waybillWith("s", "", false), absent: always},
		{Name: "waybill-relaxed", What: "the same, route with contract.repeatable: true and durability: relaxed",
			absolute: abs, connect: con, start: waybillWith("r", "    contract: {repeatable: true}\n    durability: relaxed\n", false), absent: always},
		{Name: "waybill-ram", What: "waybill as in the first line with its data folder on a RAM disk (--allow-any-filesystem): what everything but the disk costs",
			absolute: abs, connect: con, start: waybillWith("m", "", true), absent: func() string {
				if r.ram == "" {
					return "no RAM disk at /dev/shm"
				}
				return ""
			}},
		{Name: sidecar, What: "waybill as in the first line, with --memory-limit=128MiB as in a container of that size; only at 64 clients",
			absolute: abs, connect: con, only: func(s Scenario) bool { return s.Clients == 64 && s.Bytes == 1<<10 && !s.NewConn }, absent: always,
			start: func(ctx context.Context, r *rig) (*running, error) {
				other := *r
				other.flags = append(slices.Clone(r.flags), "--memory-limit=128MiB")
				run, err := other.startWaybill(ctx, "l", "", false, nil)
				r.incarnation = other.incarnation
				return run, err
			}},
		{Name: "nethttp", What: "net/http server and Transport with the same interception, written as plainly as it goes (256 idle connections, upstream verified)",
			absolute: abs, connect: con, start: startNetHTTP, absent: always},
		{Name: "squid", What: "squid with ssl-bump, cache and access log off; absolute-form goes upstream in clear",
			start: startSquid, absent: func() string {
				out, err := exec.Command("squid", "-v").CombinedOutput()
				switch {
				case err != nil:
					return "not installed (Debian package squid-openssl)"
				case !bytes.Contains(out, []byte("with-openssl")):
					return "this squid cannot intercept (the Debian package squid-openssl can)"
				case certgen() == "":
					return "squid's security_file_certgen was not found"
				}
				return ""
			}},
		{Name: "mitmproxy", What: "mitmdump with an addon of one line that sets the header; absolute-form goes upstream in clear",
			start: startMitmproxy, absent: func() string {
				if _, err := exec.LookPath("mitmdump"); err != nil {
					return "not installed (Debian package mitmproxy)"
				}
				return ""
			}},
		{Name: "tokenizer", What: "superfly/tokenizer", absent: func() string {
			return "its Go module could not be downloaded where this harness was written, so no tested set-up of it exists"
		}},
	}
	all = append(all, guardSystems(r)...)
	for i, name := range slices.Sorted(maps.Keys(r.compare)) {
		path := r.compare[name]
		// Beside the build that it is compared with.
		all = slices.Insert(all, 2+i, &system{Name: "waybill-" + name, What: "another build of waybill, set up as the first line", absolute: abs, connect: con, absent: always,
			start: func(ctx context.Context, r *rig) (*running, error) {
				other := *r
				other.waybill = path
				run, err := other.startWaybill(ctx, "c"+name, "", false, nil)
				r.incarnation = other.incarnation
				return run, err
			}})
	}
	return all
}

// The leak guard (CONTRACT C5) is measured by one build of Waybill that runs twice: as
// it is, and with the guard switched off, which no build for users can do.
const (
	withGuard, withoutGuard = "waybill-guard", "waybill-noguard"
	guardBytes              = 64 << 10
	guardControl            = "C5-secrets-masked"
)

func guardSystems(r *rig) []*system {
	where, ram := "on the disk", r.ram != ""
	if ram {
		where = "on a RAM disk, where nothing hides what the guard costs"
	}
	var out []*system
	for _, g := range []struct{ name, short, what, off string }{
		{withGuard, "g", "the build for tests, nothing switched off; its data folder " + where, ""},
		{withoutGuard, "n", "the same with the leak guard switched off", guardControl},
	} {
		out = append(out, &system{
			Name: g.name, What: g.what + "; only where answers have 64 KiB", absolute: originHost + ":80", connect: originHost + ":443",
			only: func(s Scenario) bool { return s.Bytes == guardBytes },
			start: func(ctx context.Context, r *rig) (*running, error) {
				other := *r
				other.waybill, other.env = r.controls, []string{control.Env + "=" + g.off}
				run, err := other.startWaybill(ctx, g.short, "", ram, nil)
				r.incarnation = other.incarnation
				return run, err
			},
			absent: func() string {
				if r.controls == "" {
					return "no build with the tag waybill_controls was given (-controls)"
				}
				return ""
			},
		})
	}
	return out
}

// sidecar is Waybill with the memory that a container gives it.
const sidecar = "waybill-sidecar"

// target is the authority that a scenario addresses.
func (s *system) target(m Mode, r *rig) string {
	switch {
	case s.absolute != "" && m == Absolute:
		return s.absolute
	case s.absolute != "":
		return s.connect
	case m == Absolute:
		return local(r.origin.Plain)
	}
	return local(r.origin.TLS)
}

// local names an address of loopback as programs that look names up themselves find it.
func local(addr string) string {
	_, port, _ := net.SplitHostPort(addr)
	return "localhost:" + port
}

var waybillReady = regexp.MustCompile(`(?s)proxy\s+http://(\S+)\s+metrics\s+(http://\S+)\s+admin\s`)

// waybillWith starts the real binary. more is YAML of the route.
func waybillWith(name, more string, ram bool) func(context.Context, *rig) (*running, error) {
	return func(ctx context.Context, r *rig) (*running, error) {
		return r.startWaybill(ctx, name, more, ram, nil)
	}
}

// startWaybill starts Waybill, under a wrapper if one is given (strace and its
// arguments). Its data folder is a new one.
func (r *rig) startWaybill(ctx context.Context, name, more string, ram bool, wrapper []string) (*running, error) {
	in := r.dir
	if ram {
		in = r.ram
	}
	dir, err := r.scratch(in, name)
	if err != nil {
		return nil, err
	}
	config := fmt.Sprintf(`version: 1
credentials:
  bench: {from: {file: %q}, label: bench}
default: deny
routes:
  - name: bench
    match: {host: %s}
    inject: [{header: Authorization, value: "Bearer ${secret}", credential: bench}]
    upstream: {roots: %q, resolve: {%s: %q}}
%s`, filepath.Join(r.dir, "secret"), originHost, r.originCA, originHost, r.origin.TLS, more)
	file, data := filepath.Join(dir, "waybill.yaml"), filepath.Join(dir, "d")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	args := append([]string{"serve", "--config", file, "--data", data, "--proxy", "127.0.0.1:0", "--metrics", "127.0.0.1:0"}, r.flags...)
	if ram {
		args = append(args, "--allow-any-filesystem")
	}
	path := r.waybill
	if len(wrapper) > 0 {
		args = append(append(append([]string{}, wrapper[1:]...), path), args...)
		path = wrapper[0]
	}
	run := &running{ca: filepath.Join(data, "ca", "ca.pem"), data: data}
	ready := func(out io.Reader) error {
		var text []byte
		for buf := make([]byte, 1024); ; {
			n, err := out.Read(buf)
			text = append(text, buf[:n]...)
			if m := waybillReady.FindSubmatch(text); m != nil {
				run.proxy, run.metrics = string(m[1]), string(m[2])
				if !strings.HasSuffix(run.metrics, "/metrics") {
					run.metrics = strings.TrimRight(run.metrics, "/") + "/metrics"
				}
				return nil
			}
			if err != nil {
				return fmt.Errorf("ended at its start: %w", err)
			}
		}
	}
	env := childEnv(r.env...)
	if v, ok := os.LookupEnv(profileVariable); ok {
		env = append(env, profileVariable+"="+v)
	}
	// Not beside the configuration, whose folder is watched: every line would wake somebody.
	logs := filepath.Join(dir, "logs")
	if err := os.Mkdir(logs, 0o700); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	if run.process, err = startProcess(ctx, filepath.Join(logs, "log"), dir, env, ready, path, args...); err != nil {
		return nil, err
	}
	run.measure = run.pid()
	if len(wrapper) > 0 {
		// strace detaches when it is told to end; its child is the one to tell.
		run.signal = func() int {
			family, err := descendants(run.pid())
			if err != nil || len(family) < 2 {
				return run.pid()
			}
			return family[1]
		}
	}
	return run, nil
}

// proxyArgs is what the two Go proxies of this benchmark are told, as JSON.
type proxyArgs struct {
	CA       string `json:"ca"`
	Key      string `json:"key"`
	Roots    string `json:"roots"`
	Host     string `json:"host"`
	Upstream string `json:"upstream"` // address of Host
	Inject   string `json:"inject"`   // value of Authorization
}

func (r *rig) goArgs() (string, error) {
	b, err := json.Marshal(proxyArgs{CA: r.proxyCA, Key: r.proxyKey, Roots: r.originCA, Host: originHost, Upstream: r.origin.TLS, Inject: r.authorization()})
	return string(b), err
}

func startGoproxy(ctx context.Context, r *rig) (*running, error) {
	return r.startGo(ctx, "goproxy", r.goproxy)
}

func startNetHTTP(ctx context.Context, r *rig) (*running, error) {
	return r.startGo(ctx, "nethttp", r.self, "nethttp")
}

func (r *rig) startGo(ctx context.Context, name, path string, args ...string) (*running, error) {
	dir, err := r.scratch(r.dir, name)
	if err != nil {
		return nil, err
	}
	text, err := r.goArgs()
	if err != nil {
		return nil, err
	}
	run := &running{ca: r.proxyCA}
	run.process, err = startProcess(ctx, filepath.Join(dir, "log"), dir, childEnv(), firstLine(&run.proxy), path, append(args, text)...)
	if err != nil {
		return nil, err
	}
	run.measure = run.pid()
	return run, nil
}

func startMitmproxy(ctx context.Context, r *rig) (*running, error) {
	dir, err := r.scratch(r.dir, "mitm")
	if err != nil {
		return nil, err
	}
	both, err := os.ReadFile(r.proxyCAKey)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	addon := fmt.Sprintf("def request(flow):\n    flow.request.headers[\"Authorization\"] = %q\n", r.authorization())
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	for name, text := range map[string][]byte{"mitmproxy-ca.pem": both, "addon.py": []byte(addon)} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
	}
	p, err := startProcess(ctx, filepath.Join(dir, "log"), dir, childEnv("PYTHONDONTWRITEBYTECODE=1"), nil, "mitmdump", "--quiet",
		"--listen-host", "127.0.0.1", "--listen-port", port, "--set", "confdir="+dir, "--set", "ssl_verify_upstream_trusted_ca="+r.originCA,
		"--set", "flow_detail=0", "--set", "http2=false", "--scripts", filepath.Join(dir, "addon.py"))
	if err != nil {
		return nil, err
	}
	run := &running{process: p, proxy: "127.0.0.1:" + port, ca: r.proxyCA, measure: p.pid()}
	if err := listening(ctx, run.proxy, p); err != nil {
		p.stop()
		return nil, err
	}
	return run, nil
}

// certgen is squid's helper that signs certificates.
func certgen() string {
	for _, name := range []string{"/usr/lib/squid/security_file_certgen", "/usr/libexec/squid/security_file_certgen", "/usr/lib64/squid/security_file_certgen"} {
		if _, err := os.Stat(name); err == nil {
			return name
		}
	}
	return ""
}

func startSquid(ctx context.Context, r *rig) (*running, error) {
	dir, err := r.scratch(r.dir, "squid")
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	certs := filepath.Join(dir, "certs")
	if out, err := exec.CommandContext(ctx, certgen(), "-c", "-s", certs, "-M", "4MB").CombinedOutput(); err != nil {
		return nil, fmt.Errorf("bench: security_file_certgen: %w: %s", err, out)
	}
	// It reads the keys under the account that it changes to.
	mine := make(map[string]string)
	for _, name := range []string{r.proxyCA, r.proxyKey, r.originCA} {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
		mine[name] = filepath.Join(dir, filepath.Base(name))
		if err := os.WriteFile(mine[name], text, 0o600); err != nil {
			return nil, fmt.Errorf("bench: %w", err)
		}
	}
	account, err := squidAccount(r.dir, dir)
	if err != nil {
		return nil, err
	}
	config := fmt.Sprintf(`http_port 127.0.0.1:%s ssl-bump tls-cert=%s tls-key=%s generate-host-certificates=on dynamic_cert_mem_cache_size=4MB
sslcrtd_program %s -s %s -M 4MB
ssl_bump bump all
tls_outgoing_options cafile=%s
acl me src 127.0.0.0/8
acl CONNECT method CONNECT
http_access allow me
http_access deny all
request_header_access Authorization deny all
request_header_add Authorization "%s" all
cache deny all
cache_mem 0
access_log none
cache_log %s/cache.log
cache_store_log none
sslproxy_session_cache_size 0
memory_cache_shared off
pid_filename none
coredump_dir %s
server_persistent_connections on
server_pconn_for_nonretriable allow all
client_persistent_connections on
max_filedescriptors 8192
shutdown_lifetime 1 seconds
%s`, port, mine[r.proxyCA], mine[r.proxyKey], certgen(), certs, mine[r.originCA], r.authorization(), dir, dir, account)
	file := filepath.Join(dir, "squid.conf")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	p, err := startProcess(ctx, filepath.Join(dir, "log"), dir, childEnv(), nil, "squid", "-N", "-f", file)
	if err != nil {
		return nil, err
	}
	run := &running{process: p, proxy: "127.0.0.1:" + port, ca: r.proxyCA, measure: p.pid()}
	if err := listening(ctx, run.proxy, p); err != nil {
		p.stop()
		return nil, fmt.Errorf("%w\n%s", err, tail(filepath.Join(dir, "cache.log")))
	}
	return run, nil
}

// squidAccount gives squid's folder to the account that squid changes to when root
// starts it, and returns the line that names the account.
func squidAccount(top, dir string) (string, error) {
	if os.Geteuid() != 0 {
		return "", nil
	}
	const name = "nobody"
	who, err := user.Lookup(name)
	if err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	uid, err1 := strconv.Atoi(who.Uid)
	gid, err2 := strconv.Atoi(who.Gid)
	if err := errors.Join(err1, err2, os.Chmod(top, 0o711)); err != nil { // its helpers pass through
		return "", fmt.Errorf("bench: %w", err)
	}
	err = filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error { return errors.Join(err, os.Chown(p, uid, gid)) })
	if err != nil {
		return "", fmt.Errorf("bench: %w", err)
	}
	return "cache_effective_user " + name + "\n", nil
}

// folderBytes is what the files of a folder occupy.
func folderBytes(dir string) int64 {
	var n int64
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // tidied up meanwhile
			}
			return err
		}
		if info, err := d.Info(); err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
		return nil
	})
	return n
}

// settle waits a moment so that what one measurement left to do (compaction, dirty
// pages) falls less into the next.
func settle(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
