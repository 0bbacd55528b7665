package e2e

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"waybill/internal/testkit"
)

// The sources that a secret of one line comes from, and the ways to attach it. Tokens are
// made for use as they are: they are no key of AWS and no certificate.
var (
	allSources = []string{"env", "file", "command", "vault", "kubernetes", "keyring", "hashicorp", "lease", "aws", "onepassword", "oauth", "refresh", "app"}
	tokenKinds = []string{"oauth", "refresh", "app"}
	allWays    = []string{"header", "basic", "cookie", "query", "body", "hmac", "sigv4", "mtls"}
)

// wayYAML are the entries of inject:, by way.
var wayYAML = map[string]string{
	"header": `{header: X-Api-Key, value: "${secret}", credential: %s}`,
	"basic":  `{basic: agent, credential: %s}`,
	"cookie": `{cookie: sid, credential: %s}`,
	"query":  `{query: api_key, credential: %s}`,
	"body":   `{body: /auth/token, credential: %s}`,
	"hmac":   `{header: X-Signature, value: "v1=${signature}", credential: %s, hmac: {canonical: "${method} ${target} ${body}"}}`,
	"sigv4":  `{sigv4: {service: execute-api, region: eu-west-1, access_key_id: AKIDCALLER}, credential: %s}`,
	"mtls":   `{client_certificate: true, credential: %s-pem}`,
}

// combo is one source with one way.
type combo struct{ source, way string }

func (c combo) name() string { return c.source + "-" + c.way }

func (c combo) inject() string { return fmt.Sprintf(wayYAML[c.way], c.source) }

// combos are all that waybill check accepts.
func combos() []combo {
	var out []combo
	for _, s := range allSources {
		for _, w := range allWays {
			if (w == "mtls" || w == "sigv4") && slices.Contains(tokenKinds, s) {
				continue
			}
			out = append(out, combo{s, w})
		}
	}
	return out
}

// sources are the places that every kind of credential comes from: each a server on
// loopback, a file, a program. Every secret begins with the same canary, so that one
// search finds any of them; the end tells them apart.
type sources struct {
	t      *testing.T
	canary *testkit.Canary
	appKey *testkit.Canary // a line of the GitHub App's private key
	pemKey *testkit.Canary // a line of the client certificate's
	vault  *testkit.VaultStore
	ring   *testkit.SecretService
	// url of the servers.
	hashicorp, aws, onepassword, tokens, bad string
	files                                    map[string]string
	env                                      []string
	yaml                                     string // credentials:
}

// secret is the value that a source gives.
func (k *sources) secret(name string) string { return k.canary.Value() + "-0" + name + "0" }

// newSources starts the servers. ca signs the client certificate.
func newSources(t *testing.T, ca *testkit.CA) *sources {
	t.Helper()
	k := &sources{t: t, canary: testkit.NewCanary(t), files: map[string]string{}}
	serve := func(h http.Handler) string {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		return s.URL
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	app := string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	certPath, keyPath := testkit.WriteCert(t, ca.Client("agent"))
	pair := ""
	for _, p := range []string{certPath, keyPath} {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		pair += string(b)
	}
	k.appKey = testkit.CanaryOf(strings.Split(app, "\n")[5])
	k.pemKey = testkit.CanaryOf(strings.Split(pair[strings.Index(pair, "PRIVATE KEY"):], "\n")[2])

	always := func(name string) func(int) string { return func(int) string { return k.secret(name) } }
	k.vault = &testkit.VaultStore{Token: k.secret("root"), RoleID: "role", SecretID: k.secret("secretid"), Value: always("hashicorp"), Lease: always("lease"),
		Extra: map[string]string{"pem": pair}, TTL: 3600, Refusal: k.secret("refusal")}
	k.hashicorp = serve(k.vault)
	k.aws = serve(&testkit.SecretsManager{Region: "eu-west-1", Secrets: map[string]string{"prod/api": k.secret("aws"), "prod/pem": pair}})
	k.onepassword = serve(&testkit.ConnectStore{Token: k.secret("connect"), Fields: map[string]string{"credential": k.secret("onepassword"), "pem": pair}, Refusal: k.secret("refusal")})
	k.tokens = serve(http.HandlerFunc(k.serveTokens))
	k.bad = serve(http.HandlerFunc(k.serveBadly))
	k.ring = testkit.NewSecretService(t)
	k.ring.Set("api", "me", k.secret("keyring"))
	k.ring.Set("api", "pem", pair)
	k.ring.Set("api", "lines", k.secret("keyring")+"\n"+k.secret("keyring"))

	k.env = []string{"E_SECRET=" + k.secret("env"), "E_PEM=" + pair, "E_LINES=" + k.secret("env") + "\n" + k.secret("env"), k.ring.Env, "AWS_ACCESS_KEY_ID=AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY=" + k.secret("awskey"),
		"AWS_CONFIG_FILE=/nowhere", "AWS_SHARED_CREDENTIALS_FILE=/nowhere", "AWS_EC2_METADATA_DISABLED=true"}
	k.files = map[string]string{
		"s-file": k.secret("file") + "\n", "s-command": k.secret("command"), "s-client": k.secret("client"), "s-root": k.secret("root"), "s-secretid": k.secret("secretid"), "s-connect": k.secret("connect"),
		"app.pem": app, "pair.pem": pair, "mount/..1/token": k.secret("kubernetes"), "mount/..1/pem": pair,
		"key.txt": "AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX\n",
	}
	const db = `mount: database, path: creds/ro, dynamic: true, approle: {role_id: role, secret_id: {file: s-secretid}}`
	k.yaml = `  env: {from: {env: E_SECRET}}
  env-pem: {from: {env: E_PEM}}
  file: {from: {file: s-file}}
  file-pem: {from: {file: pair.pem}}
  command: {from: {command: [cat, s-command]}}
  command-pem: {from: {command: [cat, pair.pem]}}
  vault: {from: {vault: own}}
  vault-pem: {from: {vault: pem}}
  kubernetes: {from: {kubernetes: {folder: mount, key: token}}}
  kubernetes-pem: {from: {kubernetes: {folder: mount, key: pem}}}
  keyring: {from: {keyring: {service: api, account: me}}}
  keyring-pem: {from: {keyring: {service: api, account: pem}}}
  hashicorp: {from: {hashicorp_vault: {address: "` + k.hashicorp + `", mount: secret, path: api, field: key, token: {file: s-root}}}}
  hashicorp-pem: {from: {hashicorp_vault: {address: "` + k.hashicorp + `", mount: secret, path: api, field: pem, token: {file: s-root}}}}
  lease: {from: {hashicorp_vault: {address: "` + k.hashicorp + `", field: password, ` + db + `}}}
  lease-pem: {from: {hashicorp_vault: {address: "` + k.hashicorp + `", field: pem, ` + db + `}}}
  aws: {from: {aws: {secret: prod/api, region: eu-west-1, endpoint: "` + k.aws + `"}}}
  aws-pem: {from: {aws: {secret: prod/pem, region: eu-west-1, endpoint: "` + k.aws + `"}}}
  onepassword: {from: {onepassword: {host: "` + k.onepassword + `", vault: Automation, item: API, field: credential, token: {file: s-connect}}}}
  onepassword-pem: {from: {onepassword: {host: "` + k.onepassword + `", vault: Automation, item: API, field: pem, token: {file: s-connect}}}}
  oauth: {from: {oauth: {token_url: "` + k.tokens + `/oauth", client_id: c, client_secret: {file: s-client}}}}
  refresh: {from: {oauth: {token_url: "` + k.tokens + `/refresh", client_id: c, client_secret: {file: s-client}, refresh_token: {vault: refresh}}}}
  app: {from: {github_app: {app_id: "1", installation_id: "7", private_key: {file: app.pem}, api: "` + k.tokens + `"}}}
`
	return k
}

// serveTokens plays token endpoints and GitHub's installation tokens.
func (k *sources) serveTokens(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	token := map[string]any{"token_type": "bearer", "expires_in": 3600}
	switch r.URL.Path {
	case "/oauth":
		token["access_token"] = k.secret("oauth")
	case "/refresh":
		token["access_token"], token["refresh_token"] = k.secret("refresh"), k.secret("rotated")
	case "/app/installations/7/access_tokens":
		w.WriteHeader(http.StatusCreated)
		token = map[string]any{"token": k.secret("app"), "expires_at": time.Now().Add(time.Hour).UTC()}
	default:
		w.WriteHeader(http.StatusNotFound)
	}
	_ = json.NewEncoder(w).Encode(token)
}

// serveBadly plays every store at once, as it should not be: the first segment of the path
// says how. What it was sent it repeats, secrets included.
func (k *sources) serveBadly(w http.ResponseWriter, r *http.Request) {
	_ = r.ParseForm()
	echo := fmt.Sprintf("%s %v %v %s", r.URL, r.Header, r.PostForm, k.secret("refusal"))
	text, err := json.Marshal(map[string]any{"message": echo, "error": "invalid_grant", "error_description": echo, "errors": []string{echo}})
	if err != nil {
		k.t.Error(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Echo", strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return -1
		}
		return c
	}, echo))
	switch how, _, _ := strings.Cut(r.URL.Path[1:], "/"); how {
	case "denied":
		w.WriteHeader(http.StatusForbidden)
	case "down":
		w.WriteHeader(http.StatusServiceUnavailable)
	case "malformed":
		text = []byte(`{"access_token": ` + k.secret("refusal"))
	case "moved":
		w.Header().Set("Location", "http://127.0.0.1:1/")
		w.WriteHeader(http.StatusTemporaryRedirect)
	case "slow":
		select {
		case <-r.Context().Done():
		case <-time.After(2 * time.Second):
		}
		return
	}
	_, _ = w.Write(text)
}

// install writes the files beside the configuration and fills Waybill's own vault. It
// returns what the commands said.
func (k *sources) install(r *rig) string {
	k.t.Helper()
	if err := os.MkdirAll(filepath.Join(r.dir, "mount", "..1"), 0o700); err != nil {
		k.t.Fatal(err)
	}
	for name, text := range k.files {
		r.write(name, text)
	}
	for _, l := range [][2]string{{"..1", "..data"}, {"..data/token", "token"}, {"..data/pem", "pem"}} {
		if err := os.Symlink(l[0], filepath.Join(r.dir, "mount", l[1])); err != nil {
			k.t.Fatal(err)
		}
	}
	r.env = append(r.env, k.env...)
	said := r.must("", "vault", "init", "--identity", filepath.Join(r.dir, "key.txt"))
	said += r.must(k.secret("vault"), "vault", "set", "own")
	said += r.must(k.files["pair.pem"], "vault", "set", "pem")
	return said + r.must(k.secret("spent"), "vault", "set", "refresh")
}

// must runs a command that has to succeed, with that input, and returns what it said.
func (r *rig) must(stdin string, args ...string) string {
	r.t.Helper()
	code, out, errs := testkit.Run(r.t, testkit.Command{Path: r.bin, Args: args, Env: append([]string{"WAYBILL_CONFIG=" + r.config, "WAYBILL_DATA=" + r.data}, r.environ()...), Dir: r.dir, Stdin: strings.NewReader(stdin)})
	if code != 0 {
		r.t.Fatalf("waybill %s: %d %s %s", strings.Join(args, " "), code, out, errs)
	}
	return out + errs
}
