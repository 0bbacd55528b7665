package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// sdkPackages are client libraries that agents use, and what takes them through a
// proxy on a Node that reads no proxy variables.
var sdkPackages = []string{"openai@6", "@anthropic-ai/sdk@1", "stripe@23", "@octokit/rest@22", "undici@6", "https-proxy-agent@7"}

// sdkCalls makes one call with default retries: argv is the library, the proxy, the
// host and the path below which its requests go. It prints how the call ended.
const sdkCalls = `
import {ProxyAgent} from 'undici'
import {HttpsProxyAgent} from 'https-proxy-agent'
import {readFileSync} from 'node:fs'
const [lib, proxy, host, base] = process.argv.slice(2)
const ca = readFileSync(process.env.NODE_EXTRA_CA_CERTS)
const dispatcher = new ProxyAgent({uri: proxy, requestTls: {ca}})
const fetchOptions = {dispatcher}
const calls = {
  async openai() {
    const {default: OpenAI} = await import('openai')
    const c = new OpenAI({apiKey: 'dummy', baseURL: 'https://' + host + base, fetchOptions})
    return c.chat.completions.create({model: 'm', messages: []})
  },
  async anthropic() {
    const {default: Anthropic} = await import('@anthropic-ai/sdk')
    const c = new Anthropic({apiKey: 'dummy', baseURL: 'https://' + host + base, fetchOptions})
    return c.messages.create({model: 'm', max_tokens: 1, messages: [{role: 'user', content: 'x'}]})
  },
  async stripe() {
    const {default: Stripe} = await import('stripe')
    const agent = new HttpsProxyAgent(proxy, {ca})
    // It has no base path: its own one is routed like the others.
    const c = new Stripe('sk_test_dummy', {host, protocol: 'https', httpAgent: agent, httpClient: Stripe.createNodeHttpClient(agent)})
    return c.rawRequest('POST', base + '/charges', {amount: 5})
  },
  async octokit() {
    const {Octokit} = await import('@octokit/rest')
    const c = new Octokit({auth: 'dummy', baseUrl: 'https://' + host + base, request: {fetch: (u, o) => fetch(u, {...o, dispatcher})}})
    return c.issues.create({owner: 'o', repo: 'r', title: 't'})
  },
}
await calls[lib]().then(() => console.log('done'), e => console.log('failed', e.status ?? e.statusCode ?? e.raw?.statusCode, e.message))
process.exit(0)
`

// TestCaseRT04SDK runs real client libraries with their default retries against an
// origin that applies the effect and is not heard of again. It installs them from npm,
// and runs in make test-long; TestCases has their documented rules.
func TestCaseRT04SDK(t *testing.T) {
	if !long() {
		return
	}
	contract.Covers(t, "L7")
	npm, node := testkit.RequireTool(t, "npm"), testkit.RequireTool(t, "node")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "package.json"), []byte(`{"type":"module","private":true}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "calls.mjs"), []byte(sdkCalls), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errs := testkit.Run(t, testkit.Command{Path: npm, Args: append([]string{"install", "--no-audit", "--no-fund", "--silent", "--ignore-scripts"}, sdkPackages...), Dir: dir}); code != 0 {
		t.Fatalf("npm: %d %s %s", code, out, errs)
	}
	ca := testkit.NewCA(t)
	b := newBed(t, ca, rigOptions{})
	b.begin()
	suffix := map[string]string{"openai": "/chat/completions", "anthropic": "/v1/messages", "stripe": "/charges", "octokit": "/repos/o/r/issues"}
	for lib, rest := range suffix {
		for end, turn := range map[string]testkit.Turn{
			"lost":  dies(),
			"cut":   testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"), testkit.Close()),
			"stall": testkit.Respond(testkit.Stall()),
			"502":   testkit.Respond(testkit.Reply(502, "bad gateway")),
			"500":   testkit.Respond(testkit.Reply(500, `{"error":{"message":"no"}}`, "Content-Type", "application/json")),
		} {
			base := "/v1/slow/" + lib + "/" + end
			b.on(payHost, base+rest, turn)
			code, out, errs := testkit.Run(t, testkit.Command{Path: node, Args: []string{"calls.mjs", lib, "http://" + b.addr, payHost, base}, Dir: dir, Env: []string{"NODE_EXTRA_CA_CERTS=" + b.roots}})
			if code != 0 || !strings.HasPrefix(out, "failed") {
				t.Errorf("%s, %s: %d %s %s", lib, end, code, out, errs)
			}
			if n, sent := len(b.arrivals(payHost, base+rest)), len(sentTo(b.all(t), base+rest)); n != 1 || sent != 1 {
				t.Errorf("%s after %s: sent %d times, %d arrivals: %s", lib, end, sent, n, out)
			}
		}
		// Nothing left: those that come again by themselves may.
		if lib == "octokit" {
			continue
		}
		base := "/v1/" + lib
		_, out, _ := testkit.Run(t, testkit.Command{Path: node, Args: []string{"calls.mjs", lib, "http://" + b.addr, downHost, base}, Dir: dir, Env: []string{"NODE_EXTRA_CA_CERTS=" + b.roots}})
		if n := len(sentTo(b.all(t), base+rest)); n < 2 {
			t.Errorf("%s does not come again where it may: sent %d times: %s", lib, n, out)
		}
	}
	b.finish(t)
}
