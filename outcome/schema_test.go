package outcome_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

const schemaFile = "../configs/envelope.schema.json"

func schemaDoc(t *testing.T) map[string]any {
	t.Helper()
	b, err := os.ReadFile(filepath.FromSlash(schemaFile))
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	return doc.(map[string]any)
}

func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	c := jsonschema.NewCompiler()
	c.UseLoader(jsonschema.SchemeURLLoader{}) // nothing is fetched
	if err := c.AddResource("envelope.json", schemaDoc(t)); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("envelope.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func check(s *jsonschema.Schema, data []byte) error {
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		return err
	}
	return s.Validate(v)
}

func TestSchemaTakesEveryEnvelope(t *testing.T) {
	contract.Covers(t, "L1")
	s := compiled(t)
	rapid.Check(t, func(t *rapid.T) {
		env, shape := genEnvelope().Draw(t, "envelope"), genShape().Draw(t, "shape")
		shape.Method = ""
		if err := check(s, env.Answer(shape).Body); err != nil {
			t.Fatalf("%v", err)
		}
	})
	for _, f := range allFacts() {
		env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{ResponseComplete: true})
		b, err := json.Marshal(env)
		if err != nil {
			t.Fatal(err)
		}
		if err := check(s, b); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
	}
}

func TestSchemaRefuses(t *testing.T) {
	contract.Covers(t, "A1", "A8", "L1")
	s := compiled(t)
	good := `{"invocation_id":"` + anID + `","error":{"code":"REMOTE_TIMEOUT","phase":"remote_execution","outcome":"unknown","retry":"reconcile","message":"m"},"message":"m",` +
		`"evidence":{"dispatch_started":true,"request_headers_sent":true,"request_complete":true,"response_headers_received":false,"response_complete":false}}`
	if err := check(s, []byte(good)); err != nil {
		t.Fatal(err)
	}
	if err := check(s, []byte(strings.Replace(good, `"dispatch_started"`, `"new_field":1,"dispatch_started"`, 1))); err != nil {
		t.Errorf("evidence may not grow: %v", err)
	}
	for _, c := range [][2]string{
		{`"remote_execution"`, `"transport"`}, {`"unknown"`, `"known"`}, {`"reconcile"`, `"transient"`}, {`"REMOTE_TIMEOUT"`, `"TIMEOUT"`},
		{`"REMOTE_TIMEOUT"`, `""`}, {`"REMOTE_TIMEOUT"`, `"ACTION_NOT_FOUND"`}, {`"phase":"remote_execution",`, ``}, {`"outcome":"unknown",`, ``}, {`"retry":"reconcile",`, ``},
		{`"message":"m"},`, `"message":""},`}, {`"message":"m",`, ``}, {`"message":"m"},`, `"message":"m","transient":true},`},
		{`"evidence"`, `"transient":true,"evidence"`}, {anID, "act_1"}, {`"dispatch_started":true,`, ``}, {`"dispatch_started":true`, `"dispatch_started":"yes"`},
		{`"dispatch_started"`, `"source":"rumour","dispatch_started"`}, {`"dispatch_started"`, `"stage":"dhcp","dispatch_started"`},
		{`"dispatch_started"`, `"attempts":[{"n":1,"outcome":"known"}],"dispatch_started"`}, {`"dispatch_started"`, `"attempts":[{"n":0,"outcome":"unknown"}],"dispatch_started"`},
		{good, `{}`}, {good, `{"invocation_id":"` + anID + `","evidence":{"dispatch_started":true,"request_headers_sent":true,"request_complete":true,"response_headers_received":true,"response_complete":false}}`},
	} {
		bad := strings.Replace(good, c[0], c[1], 1)
		if bad == good {
			t.Fatalf("%q is not there", c[0])
		}
		if err := check(s, []byte(bad)); err == nil {
			t.Errorf("the schema takes %s", bad)
		}
	}
}

func TestSchemaEnumsAreTheGoEnums(t *testing.T) {
	contract.Covers(t, "A8")
	defs := schemaDoc(t)["$defs"].(map[string]any)
	for name, want := range map[string][]string{
		"phase": names(outcome.Phases()), "outcome": names(outcome.Outcomes()), "retry": names(outcome.Retries()), "code": names(outcome.Codes()),
		"source": stringsOf(outcome.Sources()), "stage": stringsOf(outcome.Stages()),
	} {
		var have []string
		for _, v := range defs[name].(map[string]any)["enum"].([]any) {
			have = append(have, v.(string))
		}
		if !slices.Equal(have, want) {
			t.Errorf("%s is\n%q in the schema and\n%q in Go", name, have, want)
		}
	}
}

// TestSchemaFieldsAreTheGoFields: every JSON field of the Go types stands in the
// schema with its type, and no other does.
func TestSchemaFieldsAreTheGoFields(t *testing.T) {
	doc := schemaDoc(t)
	defs := doc["$defs"].(map[string]any)
	named := map[reflect.Type]string{
		reflect.TypeFor[outcome.Phase](): "phase", reflect.TypeFor[outcome.Outcome](): "outcome", reflect.TypeFor[outcome.Retry](): "retry", reflect.TypeFor[outcome.Code](): "code",
		reflect.TypeFor[outcome.Source](): "source", reflect.TypeFor[outcome.Stage](): "stage", reflect.TypeFor[outcome.Error](): "error",
		reflect.TypeFor[outcome.Evidence](): "evidence", reflect.TypeFor[outcome.Attempt](): "attempt", reflect.TypeFor[outcome.Peer](): "peer", reflect.TypeFor[outcome.Idempotency](): "idempotency",
		reflect.TypeFor[outcome.Resolution](): "resolution", reflect.TypeFor[outcome.Job](): "job", reflect.TypeFor[outcome.Items](): "items",
		reflect.TypeFor[outcome.Carried]():     "carried",
		reflect.TypeFor[outcome.RetryBudget](): "retry_budget",
		reflect.TypeFor[outcome.Approval]():    "approval",
	}
	kinds := map[reflect.Kind]string{reflect.String: "string", reflect.Bool: "boolean", reflect.Int: "integer", reflect.Int64: "integer", reflect.Uint64: "integer"}
	compare := func(name string, typ reflect.Type, schema map[string]any) {
		props := schema["properties"].(map[string]any)
		seen := map[string]bool{}
		for f := range typ.Fields() {
			key, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
			seen[key] = true
			prop, ok := props[key].(map[string]any)
			if !ok {
				t.Errorf("%s: %s is not in %s", name, key, schemaFile)
				continue
			}
			ft := f.Type
			if ft.Kind() == reflect.Pointer {
				ft = ft.Elem()
			}
			if ft.Kind() == reflect.Slice {
				ft, prop = ft.Elem(), prop["items"].(map[string]any)
			}
			ref, _ := prop["$ref"].(string)
			kind, _ := prop["type"].(string)
			switch def := named[ft]; {
			case def != "" && ref != "#/$defs/"+def, def == "" && ref == "" && kind != kinds[ft.Kind()], def == "" && ref != "" && ref != "#/$defs/digest":
				t.Errorf("%s: %s is %v, in Go a %s", name, key, prop, ft)
			}
			required, _ := schema["required"].([]any)
			if typ != reflect.TypeFor[outcome.Error]() && slices.Contains(required, any(key)) == strings.Contains(opts, "omitempty") {
				t.Errorf("%s: %s: required in the schema and omitempty in Go do not fit", name, key)
			}
		}
		for key := range props {
			if !seen[key] {
				t.Errorf("%s: %s is in the schema only", name, key)
			}
		}
	}
	compare("envelope", reflect.TypeFor[outcome.Envelope](), doc)
	for typ, name := range named {
		if typ.Kind() == reflect.Struct {
			compare(name, typ, defs[name].(map[string]any))
		}
	}
	if got := doc["$schema"]; got != "https://json-schema.org/draft/2020-12/schema" {
		t.Errorf("$schema is %v", got)
	}
}
