package deps

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"
)

const module = "waybill"

// arrows names every package of the module and the packages of the module that its
// code, tests apart, may import.
// Every package may also import internal/control.
var arrows = map[string][]string{
	"outcome": {},
	"metrics": {"outcome"},
	"routes":  {"outcome"},
	"client":  {"outcome"},
	"inject":  {"outcome", "internal/killpoint"},
	// Stores and token makers, each with the library of its maker; sources puts them together.
	"inject/awssm":       {"inject", "outcome"},
	"inject/githubapp":   {"inject", "outcome"},
	"inject/hashicorp":   {"inject", "outcome"},
	"inject/keyring":     {"inject", "outcome"},
	"inject/oauth":       {"inject", "outcome", "internal/killpoint"},
	"inject/onepassword": {"inject", "outcome"},
	"inject/sigv4":       {"inject", "outcome"},
	"inject/vault":       {"inject", "outcome"},
	"inject/sources":     {"inject", "inject/awssm", "inject/githubapp", "inject/hashicorp", "inject/keyring", "inject/oauth", "inject/onepassword", "inject/vault"},
	// The one place where a credential's name meets its secret.
	"dispatch":               {"dispatch/leak", "outcome", "routes", "inject", "inject/sigv4", "metrics", "internal/killpoint"},
	"dispatch/leak":          {},
	"dispatch/httpx":         {"dispatch", "dispatch/leak", "outcome", "routes", "metrics", "internal/killpoint"},
	"dispatch/sshx":          {"dispatch", "outcome", "routes", "internal/killpoint"},
	"journal":                {"dispatch", "outcome", "metrics", "internal/killpoint", "journal/internal/hooks"},
	"journal/internal/hooks": {},
	"journal/audit":          {"dispatch", "journal", "internal/killpoint"},
	"proxy":                  {"dispatch", "outcome", "metrics", "internal/killpoint"},
	"internal/config":        {"configs", "routes", "inject", "outcome"},
	"cmd/waybill": {"client", "configs", "dispatch", "dispatch/httpx", "dispatch/sshx", "inject", "inject/keyring", "inject/sources", "inject/vault", "internal/config", "journal", "journal/audit",
		"internal/killpoint", "internal/telemetry", "metrics", "outcome", "proxy", "routes"},
	"configs":            {},
	"docs":               {},
	"internal/control":   {},
	"internal/telemetry": {},
	"internal/killpoint": {},
	// From here on: for tests only, or tools of the house.
	"internal/bench":                   {},
	"internal/bench/cmd/waybill-bench": {"internal/bench"},
	"internal/contract":                {"docs"},
	"internal/deps":                    {},
	"internal/e2e":                     {},
	"deploy":                           {},
	"internal/image":                   {},
	"internal/image/cmd/waybill-image": {"internal/image"},
	"internal/testkit":                 {},
	"journal/journaltest":              {},
	"internal/testreport":              {"internal/contract"},
}

// testOnly are packages that only tests import, and tools of the house.
var testOnly = map[string][]string{
	"internal/contract":   {"internal/testreport"},
	"internal/testkit":    nil,
	"journal/journaltest": nil,
	"docs":                {"internal/contract"},
	"internal/bench":      {"internal/bench/cmd/waybill-bench"},
	"internal/image":      {"internal/image/cmd/waybill-image"},
}

// testPackages are those of testOnly whose own files are held to the rules for tests.
var testPackages = []string{"internal/testkit", "journal/journaltest"}

// neverImported are packages that nobody imports, tests in other folders included;
// cmd/waybill alone wires proxy.
var neverImported = []string{"proxy", "cmd/waybill", "internal/deps", "internal/e2e", "internal/testreport"}

// owner is a dependency and the packages whose code may import it. A dependency
// that is not listed is refused: its line says what it is for.
type owner struct {
	prefix   string   // import path, or a prefix of it that ends before a slash
	packages []string // that may import it in their code
	// tests: any package's tests may import it. Otherwise only those of its packages may.
	tests bool
}

var owners = []owner{
	{"github.com/elazarl/goproxy", []string{"proxy"}, false},
	{"github.com/dgraph-io/badger", []string{"journal"}, false},
	{"github.com/prometheus/client_golang", []string{"metrics"}, true},
	{"github.com/prometheus/client_model", []string{"metrics"}, true},
	{"github.com/prometheus/common", []string{"metrics"}, true},
	{"gopkg.in/yaml.v3", []string{"internal/config"}, true},
	{"github.com/dunglas/httpsfv", []string{"outcome"}, true},
	{"github.com/oklog/ulid", []string{"dispatch", "journal"}, true},           // ids of actions and of boots
	{"github.com/go-jose/go-jose/v4", []string{"proxy", "internal/e2e"}, true}, // tokens of service accounts; replaces JWS and JWK of our own
	{"google.golang.org/protobuf", nil, true},                                  // reading what a collector gets, in tests
	{"go.opentelemetry.io", []string{"internal/telemetry"}, true},              // traces; nothing on the way of a request imports it
	{"github.com/go-logr/logr", []string{"internal/telemetry"}, false},         // the logger that OpenTelemetry takes; to silence it
	{"github.com/fsnotify/fsnotify", []string{"internal/config", "cmd/waybill"}, false},
	{"github.com/spf13/cobra", []string{"cmd/waybill"}, false},
	{"github.com/spf13/pflag", []string{"cmd/waybill"}, false},
	// The content codings that the standard library does not decode.
	{"github.com/andybalholm/brotli", []string{"dispatch/leak"}, true},
	{"github.com/klauspost/compress/zstd", []string{"dispatch/leak"}, true},
	{"golang.org/x/net/http2", []string{"proxy", "dispatch/httpx"}, true},
	{"golang.org/x/net/idna", []string{"routes", "dispatch"}, false},
	{"golang.org/x/net/websocket", []string{"internal/e2e"}, false},      // a peer for tests
	{"golang.org/x/net/dns/dnsmessage", []string{"internal/e2e"}, false}, // a name server for tests
	{"github.com/godbus/dbus/v5", []string{"internal/testkit"}, false},   // a keyring for tests, with the library of go-keyring
	{"golang.org/x/net/http/httpguts", []string{"routes", "inject", "proxy", "dispatch", "dispatch/httpx"}, false},
	{"golang.org/x/crypto/ssh", []string{"dispatch", "dispatch/sshx", "proxy", "internal/config", "cmd/waybill"}, true}, // the SSH protocol, both sides
	{"golang.org/x/crypto/chacha20poly1305", []string{"journal"}, false},                                                // sealed records; the standard library has it internally only
	{"github.com/modelcontextprotocol/go-sdk", []string{"cmd/waybill"}, true},                                           // the official SDK; replaces JSON-RPC, sessions and streamable HTTP of our own
	{"software.sslmate.com/src/go-pkcs12", []string{"cmd/waybill"}, true},                                               // Java's trust store; replaces a call of keytool
	// Waybill's own vault: replaces an encrypted file format of our own.
	{"filippo.io/age", []string{"inject/vault"}, true},
	// The signer of AWS itself: replaces canonical requests of our own.
	{"github.com/aws/aws-sdk-go-v2", []string{"inject/sigv4", "inject/awssm"}, true},
	{"github.com/aws/smithy-go", []string{"inject/awssm"}, true},
	{"github.com/hashicorp/vault/api", []string{"inject/hashicorp"}, true}, // the store's own client: replaces logins, leases and KV v2 of our own
	{"github.com/zalando/go-keyring", []string{"inject/keyring"}, true},    // replaces three system interfaces
	{"golang.org/x/oauth2", []string{"inject/oauth"}, true},                // replaces requests to token endpoints of our own
	{"golang.org/x/term", []string{"cmd/waybill"}, false},                  // passphrases without echo
	{"golang.org/x/sys", []string{"journal", "journal/audit", "cmd/waybill"}, true},
	{"github.com/aws/aws-sdk-go-v2", []string{"inject/sigv4"}, true},
	{"golang.org/x/sys", []string{"journal", "cmd/waybill"}, true},
	{"github.com/google/go-containerregistry", []string{"internal/image"}, true}, // OCI images; replaces a container engine
	{"k8s.io/api", nil, true},       // decodes the manifests strictly; replaces a cluster
	{"sigs.k8s.io/yaml", nil, true}, // YAML as Kubernetes and Helm read it
	{"github.com/rogpeppe/go-internal", nil, true},
	{"github.com/santhosh-tekuri/jsonschema", nil, true},
	{"go.uber.org/goleak", nil, true},
	{"github.com/hanwen/go-fuse/v2", []string{"internal/testkit"}, true}, // disks that lose, files that fail; replaces a kernel module
	{"pgregory.net/rapid", nil, true},
}

// source is one file of a package.
type source struct {
	pkg     string // folder, from the module's root
	file    string
	test    bool // a _test.go file, or one of testPackages
	imports []string
}

// TestImports holds every file of the module against the table.
func TestImports(t *testing.T) {
	sources, err := readSources("../..")
	if err != nil {
		t.Fatal(err)
	}
	if len(sources) < 20 {
		t.Fatalf("only %d files found: the test looks in the wrong folder", len(sources))
	}
	for _, problem := range check(sources) {
		t.Error(problem)
	}
}

// check returns what the table does not allow, one line each.
func check(sources []source) []string {
	var out []string
	unlisted := map[string]bool{}
	for _, s := range sources {
		allowed, listed := arrows[s.pkg]
		if !listed && !unlisted[s.pkg] {
			unlisted[s.pkg] = true
			out = append(out, fmt.Sprintf("%s: package %s is not in the table of internal/deps: say what it may import", s.file, s.pkg))
		}
		for _, imp := range s.imports {
			refuse := func(format string, args ...any) {
				out = append(out, fmt.Sprintf("%s imports %s: ", s.file, imp)+fmt.Sprintf(format, args...))
			}
			if inner, ok := strings.CutPrefix(imp, module+"/"); ok {
				switch {
				case inner == s.pkg: // an external test of its own package
				case slices.Contains(neverImported, inner) && !(inner == "proxy" && s.pkg == "cmd/waybill"):
					refuse("nobody imports it")
				case s.test && (s.pkg == "routes" && inner == "inject" || s.pkg == "inject" && inner == "routes"):
					refuse("routes and inject never meet")
				case s.test:
				case testHelper(inner, s.pkg):
				case isTestOnly(inner):
					refuse("only tests may")
				case inner != "internal/control" && listed && !slices.Contains(allowed, inner):
					refuse("%s may import %s only", s.pkg, strings.Join(allowed, ", "))
				}
				continue
			}
			if first, _, _ := strings.Cut(imp, "/"); !strings.Contains(first, ".") {
				continue // the standard library
			}
			o, ok := ownerOf(imp)
			switch {
			case !ok:
				refuse("the dependency is not in the table of internal/deps: say who may import it, and what it replaces")
			case slices.Contains(o.packages, s.pkg):
			case s.test && o.tests:
			case len(o.packages) == 0:
				refuse("only tests may")
			default:
				refuse("only %s may", strings.Join(o.packages, ", "))
			}
		}
	}
	sort.Strings(out)
	return out
}

func isTestOnly(pkg string) bool { _, ok := testOnly[pkg]; return ok }

func testHelper(pkg, by string) bool { return slices.Contains(testOnly[pkg], by) }

// ownerOf returns the longest prefix that fits.
func ownerOf(imp string) (owner, bool) {
	var best owner
	for _, o := range owners {
		if (imp == o.prefix || strings.HasPrefix(imp, o.prefix+"/")) && len(o.prefix) > len(best.prefix) {
			best = o
		}
	}
	return best, best.prefix != ""
}

// readSources parses the imports of every Go file under root, whatever its build
// constraints. Folders named testdata are left out, and modules of their own: tools/,
// and the base of the benchmark, which may use goproxy because it is none of ours.
func readSources(root string) ([]source, error) {
	var out []source
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		switch {
		case d.IsDir() && rel != "." && (ownModule(p) || d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") || strings.HasPrefix(d.Name(), "_")):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(p, ".go"):
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		s := source{pkg: path.Dir(rel), file: rel, test: strings.HasSuffix(rel, "_test.go")}
		s.test = s.test || slices.Contains(testPackages, s.pkg)
		for _, imp := range f.Imports {
			name, err := strconv.Unquote(imp.Path.Value)
			if err != nil {
				return err
			}
			s.imports = append(s.imports, name)
		}
		out = append(out, s)
		return nil
	})
	return out, err
}

func ownModule(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

// TestCheckRefuses shows that each rule of the table can fail.
func TestCheckRefuses(t *testing.T) {
	code := func(pkg, imp string) source {
		return source{pkg: pkg, file: pkg + "/x.go", imports: []string{imp}}
	}
	test := func(pkg, imp string) source {
		return source{pkg: pkg, file: pkg + "/x_test.go", test: true, imports: []string{imp}}
	}
	for name, tc := range map[string]struct {
		s    source
		want string // part of the problem; empty: none
	}{
		"an arrow":                    {code("dispatch", "waybill/routes"), ""},
		"the wrong way":               {code("routes", "waybill/dispatch"), "may import outcome only"},
		"routes meets inject":         {code("routes", "waybill/inject"), "may import outcome only"},
		"in a test":                   {test("routes", "waybill/inject"), "never meet"},
		"the other way in a test":     {test("inject", "waybill/routes"), "never meet"},
		"outcome imports anything":    {code("outcome", "waybill/metrics"), "may import"},
		"somebody imports proxy":      {code("dispatch", "waybill/proxy"), "nobody imports it"},
		"a test imports proxy":        {test("dispatch", "waybill/proxy"), "nobody imports it"},
		"its own external test":       {test("proxy", "waybill/proxy"), ""},
		"cmd wires proxy":             {code("cmd/waybill", "waybill/proxy"), ""},
		"testkit in code":             {code("cmd/waybill", "waybill/internal/testkit"), "only tests may"},
		"testkit in a test":           {test("cmd/waybill", "waybill/internal/testkit"), ""},
		"contract in code":            {code("journal", "waybill/internal/contract"), "only tests may"},
		"control in code":             {code("outcome", "waybill/internal/control"), ""},
		"a test of two rooms":         {test("dispatch", "waybill/journal"), ""},
		"a new folder":                {code("fleet", "waybill/outcome"), "not in the table"},
		"badger elsewhere":            {code("dispatch", "github.com/dgraph-io/badger/v4"), "only journal may"},
		"badger in a test elsewhere":  {test("dispatch", "github.com/dgraph-io/badger/v4"), "only journal may"},
		"badger in the journal":       {code("journal", "github.com/dgraph-io/badger/v4/options"), ""},
		"goproxy elsewhere":           {code("cmd/waybill", "github.com/elazarl/goproxy"), "only proxy may"},
		"yaml elsewhere":              {code("routes", "gopkg.in/yaml.v3"), "only internal/config may"},
		"collectors elsewhere":        {code("dispatch", "github.com/prometheus/client_golang/prometheus"), "only metrics may"},
		"a test tool in code":         {code("journal", "pgregory.net/rapid"), "only tests may"},
		"a test tool in a test":       {test("journal", "pgregory.net/rapid"), ""},
		"a new dependency":            {code("journal", "example.org/store"), "not in the table"},
		"a prefix that is no folder":  {code("journal", "github.com/dgraph-io/badgerish"), "not in the table"},
		"a new dependency of a test":  {test("journal", "example.org/assert"), "not in the table"},
		"the standard library":        {code("outcome", "net/http"), ""},
		"the standard library's deep": {code("outcome", "crypto/internal/fips140"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := check([]source{tc.s})
			switch {
			case tc.want == "" && len(got) > 0:
				t.Errorf("refused: %q", got)
			case tc.want != "" && (len(got) != 1 || !strings.Contains(got[0], tc.want)):
				t.Errorf("%q, want one problem that says %q", got, tc.want)
			}
		})
	}
}

// resending are the ways into net/http that send a request again by themselves: on
// a connection that dies, or after a redirect (CONTRACT F6). Only a ClientConn may
// carry a dispatched request.
var resending = map[string]bool{
	"Client": true, "DefaultClient": true, "DefaultTransport": true,
	"Get": true, "Head": true, "Post": true, "PostForm": true,
}

// TestDispatchUsesNoClientThatResends looks for them in the code of the packages
// that dispatch. A Transport is allowed there, for NewClientConn; its RoundTrip is
// what the tests of dispatch/httpx look for on the wire.
func TestDispatchUsesNoClientThatResends(t *testing.T) {
	for _, dir := range []string{"dispatch", "dispatch/httpx", "proxy"} {
		files, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		if len(files) == 0 {
			t.Errorf("no file in %s", dir)
		}
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, pos := range uses(f, "net/http", resending) {
				t.Errorf("%s: net/http re-sends by itself here (CONTRACT F6)", fset.Position(pos))
			}
		}
	}
}

// uses finds selectors of the imported package with one of the names.
func uses(f *ast.File, imported string, names map[string]bool) []token.Pos {
	local := ""
	for _, imp := range f.Imports {
		if p, err := strconv.Unquote(imp.Path.Value); err == nil && p == imported {
			local = path.Base(imported)
			if imp.Name != nil {
				local = imp.Name.Name
			}
		}
	}
	if local == "" {
		return nil
	}
	var out []token.Pos
	ast.Inspect(f, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok && names[sel.Sel.Name] {
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == local {
				out = append(out, sel.Pos())
			}
		}
		return true
	})
	return out
}

func TestUses(t *testing.T) {
	for src, want := range map[string]int{
		`import "net/http"; var c http.Client`:          1,
		`import h "net/http"; var _ = h.Get`:            1,
		`import "net/http"; var t http.Transport`:       0,
		`import "other/http"; var c http.Client`:        0,
		`import "net/http"; func f(x T) { x.Client() }`: 0,
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x; "+src, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(uses(f, "net/http", resending)); got != want {
			t.Errorf("%s: %d, want %d", src, got, want)
		}
	}
}
