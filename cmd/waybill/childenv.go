package main

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"software.sslmate.com/src/go-pkcs12"
)

// childEnv describes the environment that makes a program's requests go through
// the proxy and makes the program trust its CA: the measured list of
// docs/cli.md, "What run sets".
type childEnv struct {
	Inherited []string // the parent's environment
	ProxyURL  string   // http://user:token@host:port
	NoProxy   string   // never inherited: an inherited list lets routes slip past
	AllProxy  bool     // also ALL_PROXY: CONNECT to any port
	CAFile    string   // ca.pem
	Dir       string   // an existing folder (0700) for the generated files
	// Secrets names variables that hold Waybill's own secrets; the child must not
	// see them (CONTRACT C2).
	Secrets []string
	// Placeholders gives a value to variables without which client libraries refuse
	// to start. They are set only when unset.
	Placeholders map[string]string
	// SystemRoots is the bundle of the system, nil when it has none.
	SystemRoots []byte
}

// builtEnv is the result of build.
type builtEnv struct {
	Set      map[string]string
	Unset    []string // sorted; inherited variables that are taken away
	Warnings []string
}

// Variables whose file replaces the program's own trust store: they need a whole
// bundle (system roots and ours).
var replacingCA = []string{
	"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "PIP_CERT",
	"CARGO_HTTP_CAINFO", "NIX_SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "BUNDLE_SSL_CA_CERT",
	"npm_config_cafile", "HTTPLIB2_CA_CERTS", "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
}

// Variables whose file is added to the program's own trust store.
var addingCA = []string{"NODE_EXTRA_CA_CERTS", "DENO_CERT"}

// Variables that are only extended where the parent set them.
var inheritedCA = []string{"CODEX_CA_CERTIFICATE"}

// Variables that would lead around the proxy, or name another one.
var droppedProxy = []string{"ALL_PROXY", "all_proxy", "FTP_PROXY", "ftp_proxy", "GIT_PROXY_SSL_CAINFO", "CARGO_HTTP_PROXY", "CGI_HTTP_PROXY"}

// build writes the files it needs into e.Dir and returns the variables. A trust
// bundle that an inherited variable names is kept: our CA is appended to that
// bundle, not to the system's. A bundle that cannot be read is an event for the
// person (a warning), not a reason to trust less than the system does.
func (e *childEnv) build() (*builtEnv, error) {
	out := &builtEnv{Set: map[string]string{}}
	ca, err := os.ReadFile(e.CAFile)
	if err != nil {
		return nil, fmt.Errorf("CA certificate: %w", err)
	}
	if !hasCertificate(ca) {
		return nil, fmt.Errorf("CA certificate %s: no certificate in it", e.CAFile)
	}
	u, err := url.Parse(e.ProxyURL)
	if err != nil || u.Hostname() == "" || u.Port() == "" {
		return nil, fmt.Errorf("proxy address: not of the form http://host:port")
	}
	if e.SystemRoots == nil {
		out.warn("this system has no CA bundle; programs will trust the Waybill CA only")
	}

	e.proxyVars(out, u)
	bundle, err := e.caVars(out, ca)
	if err != nil {
		return nil, err
	}
	if err := e.wget(out, ca, bundle); err != nil {
		return nil, err
	}
	if err := e.java(out, u, ca); err != nil {
		return nil, err
	}
	for _, name := range e.Secrets {
		out.unset(e.Inherited, name)
	}
	for _, name := range slices.Sorted(maps.Keys(e.Placeholders)) {
		if v, ok := lookupOK(e.Inherited, name); (!ok || v == "") || slices.Contains(e.Secrets, name) {
			out.Set[name] = e.Placeholders[name]
		}
	}
	for name := range out.Set {
		out.Unset = slices.DeleteFunc(out.Unset, func(s string) bool { return s == name })
	}
	slices.Sort(out.Unset)
	out.Unset = slices.Compact(out.Unset)
	return out, nil
}

// Environ returns the environment of the child.
func (b *builtEnv) Environ(inherited []string) []string {
	var env []string
	for _, kv := range inherited {
		name, _, _ := strings.Cut(kv, "=")
		if _, set := b.Set[name]; set || slices.Contains(b.Unset, name) {
			continue
		}
		env = append(env, kv)
	}
	for _, name := range slices.Sorted(maps.Keys(b.Set)) {
		env = append(env, name+"="+b.Set[name])
	}
	return env
}

func (b *builtEnv) warn(format string, args ...any) {
	b.Warnings = append(b.Warnings, fmt.Sprintf(format, args...))
}

func (b *builtEnv) unset(inherited []string, name string) {
	if _, ok := lookupOK(inherited, name); ok {
		b.Unset = append(b.Unset, name)
	}
}

func (e *childEnv) proxyVars(out *builtEnv, u *url.URL) {
	for _, name := range droppedProxy {
		out.unset(e.Inherited, name)
	}
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "GLOBAL_AGENT_HTTP_PROXY", "GLOBAL_AGENT_HTTPS_PROXY"} {
		out.Set[name] = e.ProxyURL
	}
	for _, name := range []string{"NO_PROXY", "no_proxy", "GLOBAL_AGENT_NO_PROXY"} {
		out.Set[name] = e.NoProxy
	}
	if e.AllProxy {
		out.Set["ALL_PROXY"], out.Set["all_proxy"] = e.ProxyURL, e.ProxyURL
	}
	out.Set["NODE_USE_ENV_PROXY"] = "1"
	// git sends credentials only after a 407, which an open proxy never gives; with
	// one method named it sends them at once, so its actions belong to the session.
	out.Set["GIT_HTTP_PROXY_AUTHMETHOD"] = "basic"
	out.Set["CLOUDSDK_PROXY_TYPE"] = "http"
	out.Set["CLOUDSDK_PROXY_ADDRESS"] = u.Hostname()
	out.Set["CLOUDSDK_PROXY_PORT"] = u.Port()
	if u.User != nil {
		out.Set["CLOUDSDK_PROXY_USERNAME"] = u.User.Username()
		if p, ok := u.User.Password(); ok {
			out.Set["CLOUDSDK_PROXY_PASSWORD"] = p
		}
	} else {
		out.unset(e.Inherited, "CLOUDSDK_PROXY_USERNAME")
		out.unset(e.Inherited, "CLOUDSDK_PROXY_PASSWORD")
	}
	// npm reads its settings from the environment in any case; one of these would
	// win over HTTPS_PROXY.
	for _, kv := range e.Inherited {
		name, _, _ := strings.Cut(kv, "=")
		switch strings.ToLower(name) {
		case "npm_config_proxy", "npm_config_https_proxy", "npm_config_http_proxy", "npm_config_noproxy", "npm_config_no_proxy":
			out.Unset = append(out.Unset, name)
		}
	}
}

// caVars sets the CA variables and returns the path of the common bundle.
func (e *childEnv) caVars(out *builtEnv, ca []byte) (string, error) {
	bundle, err := e.write("bundle.pem", joinPEM(e.SystemRoots, ca))
	if err != nil {
		return "", err
	}
	for _, name := range replacingCA {
		from := lookup(e.Inherited, name)
		if name == "npm_config_cafile" {
			from = e.npmCAFile(out)
		}
		path, err := e.extend(out, name, from, ca)
		if err != nil {
			return "", err
		}
		if path == "" {
			path = bundle
		}
		out.Set[name] = path
	}
	for _, name := range addingCA {
		path, err := e.extend(out, name, lookup(e.Inherited, name), ca)
		if err != nil {
			return "", err
		}
		if path == "" {
			path = e.CAFile
		}
		out.Set[name] = path
	}
	for _, name := range inheritedCA {
		path, err := e.extend(out, name, lookup(e.Inherited, name), ca)
		if err != nil {
			return "", err
		}
		if path != "" {
			out.Set[name] = path
		}
	}
	return bundle, nil
}

// npmCAFile finds npm's cafile: the environment in any case, else ~/.npmrc. A
// configured cafile hides NODE_EXTRA_CA_CERTS, so it has to be extended itself.
func (e *childEnv) npmCAFile(out *builtEnv) string {
	found := ""
	for _, kv := range e.Inherited {
		name, v, _ := strings.Cut(kv, "=")
		if !strings.EqualFold(name, "npm_config_cafile") {
			continue
		}
		if v != "" {
			found = v
		}
		if name != "npm_config_cafile" {
			out.Unset = append(out.Unset, name)
		}
	}
	if found != "" {
		return found
	}
	home := lookup(e.Inherited, "HOME")
	if home == "" {
		return ""
	}
	rc, err := os.ReadFile(filepath.Join(home, ".npmrc"))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(rc)) {
		if k, v, ok := strings.Cut(line, "="); ok && strings.TrimSpace(k) == "cafile" {
			found = strings.Trim(strings.TrimSpace(v), `"'`)
		}
	}
	return found
}

// extend makes a copy of the bundle at from with our CA in it and returns its
// path; from itself when our CA is in it already; "" when there is nothing to extend.
func (e *childEnv) extend(out *builtEnv, name, from string, ca []byte) (string, error) {
	if from == "" {
		return "", nil
	}
	theirs, err := readBundle(from)
	if err == nil && !hasCertificate(theirs) {
		err = fmt.Errorf("no certificate in it")
	}
	if err != nil {
		out.warn("%s=%s: %v; the system's roots are used instead", name, from, err)
		return "", nil
	}
	if st, err := os.Stat(from); err == nil && !st.IsDir() && containsAll(theirs, ca) {
		return from, nil
	}
	sum := sha256.Sum256([]byte(from))
	return e.write(fmt.Sprintf("bundle-%x.pem", sum[:6]), joinPEM(theirs, ca))
}

// wget has no variable for a CA file; it reads a wgetrc. What the person's own
// wgetrc says is kept.
func (e *childEnv) wget(out *builtEnv, ca []byte, bundle string) error {
	from := lookup(e.Inherited, "WGETRC")
	if home := lookup(e.Inherited, "HOME"); from == "" && home != "" {
		from = filepath.Join(home, ".wgetrc")
	}
	var kept []byte
	if from != "" {
		rc, err := os.ReadFile(from)
		if err != nil && !noFile(err) {
			out.warn("%s: %v; it is not taken over", from, err)
		}
		for line := range strings.Lines(string(rc)) {
			key, v, _ := strings.Cut(line, "=")
			switch strings.ReplaceAll(strings.ToLower(strings.TrimSpace(key)), "-", "_") {
			case "ca_certificate", "cacertificate":
				path, err := e.extend(out, "ca_certificate in "+from, strings.TrimSpace(v), ca)
				if err != nil {
					return err
				}
				if path != "" {
					bundle = path
				}
				continue
			case "http_proxy", "httpproxy", "https_proxy", "httpsproxy", "no_proxy", "noproxy", "use_proxy", "useproxy":
				continue // they would lead around the proxy
			}
			kept = append(kept, strings.TrimRight(line, "\n")+"\n"...)
		}
	}
	path, err := e.write("wgetrc", append(kept, "ca_certificate = "+bundle+"\n"...))
	if err != nil {
		return err
	}
	out.Set["WGETRC"] = path
	return nil
}

// java appends to JAVA_TOOL_OPTIONS: Java reads no proxy variables and trusts its
// own store only. It cannot send proxy credentials from options, so its requests
// count as those of an anonymous caller.
func (e *childEnv) java(out *builtEnv, u *url.URL, ca []byte) error {
	inherited := lookup(e.Inherited, "JAVA_TOOL_OPTIONS")
	certs := append(certificates(e.SystemRoots), certificates(ca)...)
	own, password := javaOption(inherited, "javax.net.ssl.trustStore"), javaOption(inherited, "javax.net.ssl.trustStorePassword")
	if own != "" {
		if password == "" {
			password = pkcs12.DefaultPassword
		}
		theirs, err := readTrustStore(own, password)
		if err != nil {
			out.warn("JAVA_TOOL_OPTIONS: trust store %s: %v; the system's roots are used instead", own, err)
		} else {
			certs = append(theirs, certificates(ca)...)
		}
	}
	store, err := pkcs12.Modern2023.WithRand(rand.Reader).EncodeTrustStore(unique(certs), pkcs12.DefaultPassword)
	if err != nil {
		return fmt.Errorf("trust store for Java: %w", err)
	}
	path, err := e.write("truststore.p12", store)
	if err != nil {
		return err
	}
	opts := []string{
		"-Dhttp.proxyHost=" + u.Hostname(), "-Dhttp.proxyPort=" + u.Port(),
		"-Dhttps.proxyHost=" + u.Hostname(), "-Dhttps.proxyPort=" + u.Port(),
		"-Dhttp.nonProxyHosts=" + strings.ReplaceAll(e.NoProxy, ",", "|"),
		"-Djavax.net.ssl.trustStore=" + javaQuote(path), "-Djavax.net.ssl.trustStoreType=PKCS12",
		"-Djavax.net.ssl.trustStorePassword=" + pkcs12.DefaultPassword,
	}
	// The last option wins, so ours come last.
	out.Set["JAVA_TOOL_OPTIONS"] = strings.TrimSpace(inherited + " " + strings.Join(opts, " "))
	return nil
}

// javaQuote protects a path with spaces: JAVA_TOOL_OPTIONS is split at white
// space outside of quotes.
func javaQuote(s string) string {
	if strings.ContainsAny(s, " \t") {
		return `"` + s + `"`
	}
	return s
}

func javaOption(options, name string) string {
	found := ""
	for _, o := range strings.Fields(options) {
		if v, ok := strings.CutPrefix(o, "-D"+name+"="); ok {
			found = strings.Trim(v, `"'`)
		}
	}
	return found
}

func readTrustStore(path, password string) ([]*x509.Certificate, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	certs, err := pkcs12.DecodeTrustStore(data, password)
	if err != nil {
		// The library's text may quote the input.
		return nil, fmt.Errorf("not a PKCS#12 trust store that opens with its password")
	}
	return certs, nil
}

func (e *childEnv) write(name string, data []byte) (string, error) {
	path := filepath.Join(e.Dir, name)
	if err := writeFile(path, 0o600, data); err != nil {
		return "", err
	}
	return path, nil
}

// writeFile is replaceFile where the content is another.
func writeFile(path string, mode os.FileMode, data []byte) error {
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	return replaceFile(path, mode, data)
}

// replaceFile replaces path by a rename, so that a reader never sees half of it. The name
// that it writes to first cannot be foreseen: nobody can put a link there.
func replaceFile(path string, mode os.FileMode, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	if _, err := f.Write(data); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Sync(); err != nil { // a power cut must not leave the name without its content
		_ = f.Close()
		return err
	}
	if err := f.Chmod(mode); err != nil {
		_ = f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// systemBundles are the places where systems keep their roots, as Go's
// crypto/x509 looks for them. Variables are not consulted: CONTRACT V2 and case
// CL-01 want the trust of the configuration, not of the environment.
var systemBundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Ubuntu, Gentoo, Arch
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora, RHEL
	"/etc/pki/tls/certs/ca-bundle.crt",                  // older Fedora, RHEL
	"/etc/ssl/ca-bundle.pem",                            // openSUSE
	"/etc/pki/tls/cacert.pem",                           // OpenELEC
	"/etc/ssl/cert.pem",                                 // Alpine, macOS, FreeBSD
}

// systemRoots returns the system's bundle, or nil.
func systemRoots() []byte {
	for _, path := range systemBundles {
		if data, err := os.ReadFile(path); err == nil && hasCertificate(data) {
			return data
		}
	}
	for _, dir := range []string{"/etc/ssl/certs", "/etc/pki/tls/certs"} {
		if data, err := readBundle(dir); err == nil && hasCertificate(data) {
			return data
		}
	}
	return nil
}

// readBundle reads a bundle file, or every certificate file of a folder.
func readBundle(path string) ([]byte, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !st.IsDir() {
		return os.ReadFile(path)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	var all []byte
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(path, entry.Name()))
		if err != nil || !hasCertificate(data) || containsAll(all, data) {
			continue // folders, dangling links, keys, hashed links to a file that is in already
		}
		all = joinPEM(all, data)
	}
	return all, nil
}

// joinPEM concatenates PEM files, minding a missing newline between them.
func joinPEM(parts ...[]byte) []byte {
	var out []byte
	for _, p := range parts {
		out = append(out, p...)
		if len(out) > 0 && out[len(out)-1] != '\n' {
			out = append(out, '\n')
		}
	}
	return out
}

// certificates returns the certificates in a PEM file; what is none is passed over.
func certificates(data []byte) []*x509.Certificate {
	var certs []*x509.Certificate
	for {
		var block *pem.Block
		block, data = pem.Decode(data)
		if block == nil {
			return certs
		}
		if !isCertificate(block) {
			continue
		}
		if cert, err := x509.ParseCertificate(block.Bytes); err == nil {
			certs = append(certs, cert)
		}
	}
}

// hasCertificate reports whether there is one, without reading the rest.
func hasCertificate(data []byte) bool {
	for {
		var block *pem.Block
		block, data = pem.Decode(data)
		if block == nil {
			return false
		}
		if _, err := x509.ParseCertificate(block.Bytes); err == nil && isCertificate(block) {
			return true
		}
	}
}

func isCertificate(b *pem.Block) bool {
	return b.Type == "CERTIFICATE" || b.Type == "TRUSTED CERTIFICATE"
}

func containsAll(bundle, ca []byte) bool {
	have := certificates(bundle)
	for _, c := range certificates(ca) {
		if !slices.ContainsFunc(have, c.Equal) {
			return false
		}
	}
	return true
}

func unique(certs []*x509.Certificate) []*x509.Certificate {
	seen := map[string]bool{}
	var out []*x509.Certificate
	for _, c := range certs {
		if !seen[string(c.Raw)] {
			seen[string(c.Raw)] = true
			out = append(out, c)
		}
	}
	return out
}
