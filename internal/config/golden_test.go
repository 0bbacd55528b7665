package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"gopkg.in/yaml.v3"

	"waybill/internal/contract"
	"waybill/routes"
)

var update = flag.Bool("update", false, "write the expected messages of testdata")

func files(t testing.TB, pattern string) []string {
	t.Helper()
	list, err := filepath.Glob(pattern)
	if err != nil || len(list) == 0 {
		t.Fatalf("%s: no files (%v)", pattern, err)
	}
	return list
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("got:\n%s\nwant (%s):\n%s", got, name, want)
	}
}

// Every bad file is refused whole, with exactly the messages beside it (case CF-01).
func TestBadFiles(t *testing.T) {
	contract.Covers(t, "C2", "V1")
	for _, file := range files(t, "testdata/*.bad.yaml") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			c, err := Load(file)
			var list Errors
			if c != nil || !errors.As(err, &list) || len(list) == 0 {
				t.Fatalf("Load = %v, %v; want Errors", c, err)
			}
			for _, p := range list {
				if p.File != file || p.Line < 1 || p.Column < 1 || p.Path == "" || p.What == "" || p.Fix == "" {
					t.Errorf("incomplete: %+v", p)
				}
			}
			if strings.Contains(err.Error(), "CANARY") {
				t.Errorf("a message repeats what could be a secret:\n%v", err)
			}
			golden(t, strings.TrimSuffix(file, ".yaml")+".txt", strings.ReplaceAll(err.Error(), "testdata/", "")+"\n")
		})
	}
}

// Every good file loads with exactly the warnings and routes beside it.
func TestGoodFiles(t *testing.T) {
	for _, file := range files(t, "testdata/*.good.yaml") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			c, err := Load(file)
			if err != nil {
				t.Fatal(err)
			}
			var b bytes.Buffer
			if err := NewReport(filepath.Base(file), c, nil).WriteText(&b); err != nil {
				t.Fatal(err)
			}
			for _, r := range c.Snapshot.Routes() {
				b.WriteString(shown(t, r) + "\n")
			}
			text := strings.ReplaceAll(b.String(), "testdata/", "")
			text = strings.ReplaceAll(text, c.Digest, "sha256:…") // of every field: tested in routes
			golden(t, strings.TrimSuffix(file, ".yaml")+".txt", text)
		})
	}
}

// shown prints what a route sets, without what is empty and what is a default.
func shown(t *testing.T, r *routes.Route) string {
	t.Helper()
	c := *r
	if len(c.Upstream.RootsPEM) > 0 {
		c.Upstream.RootsPEM = []byte("PEM")
	}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	defaults := reflect.ValueOf(routes.DefaultLimits())
	limits := m["Limits"].(map[string]any)
	for i := range defaults.NumField() {
		if name := defaults.Type().Field(i).Name; limits[name] == float64(defaults.Field(i).Int()) {
			delete(limits, name)
		}
	}
	prune(m)
	text, err = json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func prune(m map[string]any) {
	for k, v := range m {
		if sub, ok := v.(map[string]any); ok {
			prune(sub)
		}
		if v == nil || reflect.ValueOf(v).IsZero() || reflect.ValueOf(v).Kind() == reflect.Map && reflect.ValueOf(v).Len() == 0 {
			if k != "Repeatable" || v == nil {
				delete(m, k)
			}
		}
	}
}

// The examples that ship load without a warning.
func TestExamples(t *testing.T) {
	for _, file := range files(t, "../../configs/*.yaml") {
		c, err := Load(file)
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		for _, w := range c.Warnings {
			t.Errorf("%s", w)
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(data, []byte("# yaml-language-server: $schema=waybill.schema.json\n")) {
			t.Errorf("%s does not begin with the schema line", file)
		}
	}
}

func compileSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	f, err := os.Open("../../configs/waybill.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	doc, err := jsonschema.UnmarshalJSON(f)
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("waybill.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("waybill.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// What loads is valid by the schema that editors use; what is refused is invalid, as
// far as a schema can tell: bad files say so in their first line.
func TestSchema(t *testing.T) {
	s := compileSchema(t)
	validate := func(file string) (readable bool, err error) {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := yaml.Unmarshal(data, &v); err != nil {
			return false, err
		}
		text, err := json.Marshal(named(v)) // jsonschema wants the types of JSON
		if err != nil {
			return false, err
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err != nil {
			return false, err
		}
		return true, s.Validate(doc)
	}
	for _, file := range append(files(t, "testdata/*.good.yaml"), files(t, "../../configs/*.yaml")...) {
		if _, err := validate(file); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	for _, file := range files(t, "testdata/*.bad.yaml") {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		line, _, _ := strings.Cut(string(data), "\n")
		readable, err := validate(file)
		got := "# schema: rejects"
		switch {
		case !readable:
			got = "# schema: unreadable"
		case err == nil:
			got = "# schema: accepts"
		}
		if line != got {
			t.Errorf("%s: the first line says %q, it is %q (%v)", file, line, got, err)
		}
	}
}

// named makes the keys of mappings the names that JSON has: statuses are numbers in YAML.
func named(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = named(v[k])
		}
	case map[any]any:
		out := make(map[string]any, len(v))
		for k, e := range v {
			out[fmt.Sprint(k)] = named(e)
		}
		return out
	case time.Time:
		return v.Format(time.DateOnly) // YAML 1.1; editors read YAML 1.2, where it is text
	case []any:
		for i := range v {
			v[i] = named(v[i])
		}
	}
	return v
}

// The schema knows exactly the keys that the parser knows.
func TestSchemaKeys(t *testing.T) {
	data, err := os.ReadFile("../../configs/waybill.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	type object struct {
		Properties map[string]json.RawMessage `json:"properties"`
	}
	var doc struct {
		object
		Defs map[string]object `json:"$defs"`
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		t.Fatal(err)
	}
	var from object
	if err := json.Unmarshal(doc.Defs["credential"].Properties["from"], &from); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		got  object
		want schema
	}{
		"document": {doc.object, rootSchema}, "listen": {doc.Defs["listen"], listenSchema}, "audit": {doc.Defs["audit"], auditSchema},
		"audit_checkpoint": {doc.Defs["audit_checkpoint"], checkpointSchema}, "audit_destination": {doc.Defs["audit_destination"], auditDestinationSchema}, "caller": {doc.Defs["caller"], callerSchema}, "kubernetesCaller": {doc.Defs["kubernetesCaller"], kubernetesCallerSchema}, "listenTLS": {doc.Defs["listenTLS"], listenTLSSchema},
		"credential": {doc.Defs["credential"], credentialSchema}, "from": {from, sourceSchema}, "route": {doc.Defs["route"], routeSchema},
		"kubernetesSecret": {doc.Defs["kubernetesSecret"], kubernetesSchema}, "keyring": {doc.Defs["keyring"], keyringSchema}, "hashicorpVault": {doc.Defs["hashicorpVault"], hashicorpSchema},
		"awsSecret": {doc.Defs["awsSecret"], awsSchema}, "onePassword": {doc.Defs["onePassword"], onePasswordSchema}, "oauth": {doc.Defs["oauth"], oauthSchema}, "gitHubApp": {doc.Defs["gitHubApp"], gitHubAppSchema},
		"hmac": {doc.Defs["hmac"], hmacSchema}, "sigv4": {doc.Defs["sigv4"], sigv4Schema},
		"match": {doc.Defs["match"], matchSchema}, "injection": {doc.Defs["injection"], injectSchema}, "contract": {doc.Defs["contract"], contractSchema},
		"idempotency": {doc.Defs["idempotency"], idempotencySchema}, "retry": {doc.Defs["retry"], retrySchema}, "meaning": {doc.Defs["meaning"], responseSchema},
		"reconcile": {doc.Defs["reconcile"], reconcileSchema}, "async": {doc.Defs["async"], asyncSchema}, "batch": {doc.Defs["batch"], batchSchema},
		"marker": {doc.Defs["marker"], markerSchema}, "condition": {doc.Defs["condition"], conditionSchema},
		"upstream": {doc.Defs["upstream"], upstreamSchema}, "limits": {doc.Defs["limits"], limitsSchema},
		"approvals": {doc.Defs["approvals"], approvalsSchema}, "notify": {doc.Defs["notify"], notifySchema}, "decisions": {doc.Defs["decisions"], decisionsSchema},
		"upstreamProxy": {doc.Defs["upstreamProxy"], upstreamProxySchema},
		"approval":      {doc.Defs["approval"], approvalSchema}, "approval-rule": {doc.Defs["approval-rule"], approvalRuleSchema},
		"ssh": {doc.Defs["ssh"], sshSchema}, "command": {doc.Defs["command"], commandSchema}, "confirm": {doc.Defs["confirm"], confirmSchema},
		"verdict": {doc.Defs["verdict"], verdictSchema}, "jump": {doc.Defs["jump"], jumpSchema},
	} {
		want := slices.Clone(c.want.keys)
		for k, allowed := range c.want.unbuilt {
			if len(allowed) > 0 { // its default may be written
				want = append(want, k)
			}
		}
		var got []string
		for k := range c.got.Properties {
			got = append(got, k)
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s: the schema has %v, the parser %v", name, got, want)
		}
	}
	// and the example with every key has every key of a route
	full, err := os.ReadFile("../../configs/full.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []schema{rootSchema, listenSchema, auditSchema, checkpointSchema, auditDestinationSchema, callerSchema, credentialSchema, sourceSchema, routeSchema, matchSchema, injectSchema, contractSchema, idempotencySchema, retrySchema, responseSchema, limitsSchema, approvalSchema, approvalRuleSchema,
		kubernetesSchema, keyringSchema, hashicorpSchema, awsSchema, onePasswordSchema, oauthSchema, gitHubAppSchema, hmacSchema, sigv4Schema, reconcileSchema, asyncSchema, batchSchema, markerSchema, conditionSchema,
		sshSchema, commandSchema, confirmSchema, verdictSchema, jumpSchema} {
		for _, k := range s.keys {
			if !bytes.Contains(full, []byte(k+":")) && k != "path" {
				t.Errorf("full.yaml does not show %s", k)
			}
		}
	}
}
