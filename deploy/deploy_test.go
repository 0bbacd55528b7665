// Package deploy holds what runs Waybill elsewhere: charts, units, rules, dashboards. Its
// tests render and check them.
package deploy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"text/template"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"

	"waybill/internal/testkit"
)

const chart = "helm/waybill"

// render renders the chart's templates as Helm does. The real Helm takes minutes to compile,
// so this is the part of it that the chart uses: text/template, the functions below, and
// values over the chart's defaults. TestHelm, of make test-long, holds it against Helm byte
// for byte.
func render(values map[string]any) (map[string]string, error) {
	defaults := map[string]any{}
	if err := load(filepath.Join(chart, "values.yaml"), &defaults); err != nil {
		return nil, err
	}
	about := map[string]any{}
	if err := load(filepath.Join(chart, "Chart.yaml"), &about); err != nil {
		return nil, err
	}
	merged := merge(defaults, values)
	if err := valid(merged); err != nil {
		return nil, err
	}
	dot := map[string]any{
		"Values": merged, "Release": map[string]any{"Name": "waybill", "Namespace": "agents"},
		"Chart": map[string]any{"AppVersion": about["appVersion"]}, "Files": files{},
	}
	root := template.New("").Option("missingkey=zero")
	root.Funcs(functions(root))
	names, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		b, err := os.ReadFile(n)
		if err != nil {
			return nil, err
		}
		if _, err := root.New(filepath.Base(n)).Parse(string(b)); err != nil {
			return nil, err
		}
	}
	out := map[string]string{}
	for _, n := range names {
		if strings.HasSuffix(n, ".tpl") {
			continue
		}
		var b bytes.Buffer
		if err := root.ExecuteTemplate(&b, filepath.Base(n), dot); err != nil {
			return nil, err
		}
		out[filepath.Base(n)] = b.String()
	}
	return out, nil
}

type files struct{}

func (files) Get(name string) string {
	b, err := os.ReadFile(filepath.Join(chart, name))
	if err != nil {
		return ""
	}
	return string(b)
}

func functions(root *template.Template) template.FuncMap {
	indent := func(n int, s string) string {
		pad := strings.Repeat(" ", n)
		return pad + strings.ReplaceAll(s, "\n", "\n"+pad)
	}
	number := func(v any) int64 {
		n, _ := strconv.ParseFloat(fmt.Sprint(v), 64)
		return int64(n)
	}
	return template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var b strings.Builder
			err := root.ExecuteTemplate(&b, name, data)
			return b.String(), err
		},
		"nindent": func(n int, s string) string { return "\n" + indent(n, s) },
		"toYaml": func(v any) (string, error) {
			b, err := yaml.Marshal(v)
			return strings.TrimSuffix(string(b), "\n"), err
		},
		"toJson": func(v any) (string, error) {
			b, err := json.Marshal(v)
			return string(b), err
		},
		"default": func(d, v any) any {
			if v == nil || v == "" {
				return d
			}
			return v
		},
		"quote":      func(v any) string { return strconv.Quote(fmt.Sprint(v)) },
		"trunc":      func(n int, s string) string { return s[:min(n, len(s))] },
		"trimSuffix": func(x, s string) string { return strings.TrimSuffix(s, x) },
		"contains":   func(x, s string) bool { return strings.Contains(s, x) },
		"int":        number,
		"add": func(list ...any) (sum int64) {
			for _, v := range list {
				sum += number(v)
			}
			return sum
		},
		"list": func(list ...any) []any { return list },
		"dict": func(kv ...any) map[string]any {
			out := map[string]any{}
			for i := 0; i+1 < len(kv); i += 2 {
				out[fmt.Sprint(kv[i])] = kv[i+1]
			}
			return out
		},
		"fail": func(s string) (string, error) { return "", errors.New(s) },
	}
}

func merge(a, b map[string]any) map[string]any {
	out := maps.Clone(a)
	for k, v := range b {
		if v == nil { // Helm's way to do without a default
			delete(out, k)
			continue
		}
		if inner, ok := v.(map[string]any); ok {
			if base, ok := out[k].(map[string]any); ok {
				v = merge(base, inner)
			}
		}
		out[k] = v
	}
	return out
}

func load(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return yaml.Unmarshal(b, v)
}

// valid holds values against the chart's schema.
func valid(values map[string]any) error {
	b, err := os.ReadFile(filepath.Join(chart, "values.schema.json"))
	if err != nil {
		return err
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		return err
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("values.json", doc); err != nil {
		return err
	}
	s, err := c.Compile("values.json")
	if err != nil {
		return err
	}
	text, err := json.Marshal(values)
	if err != nil {
		return err
	}
	inst, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return err
	}
	return s.Validate(inst)
}

var separator = regexp.MustCompile(`(?m)^---\n?`)

// documents splits manifests, without those that hold nothing but comments.
func documents(text string) (out []string) {
	for _, d := range separator.Split(text, -1) {
		var v map[string]any
		if err := yaml.Unmarshal([]byte(d), &v); err == nil && len(v) == 0 {
			continue
		}
		out = append(out, d)
	}
	return out
}

// objects are decoded manifests of one form.
type objects struct {
	deployment *appsv1.Deployment
	set        *appsv1.StatefulSet
	policies   []networkingv1.NetworkPolicy
	configs    map[string]corev1.ConfigMap
	kinds      []string
}

// decode decodes each document strictly into the API's own type: an unknown field fails.
func decode(t *testing.T, docs []string) objects {
	t.Helper()
	o := objects{configs: map[string]corev1.ConfigMap{}}
	for _, d := range docs {
		var kind struct {
			APIVersion string `json:"apiVersion"`
			Kind       string `json:"kind"`
		}
		if err := yaml.Unmarshal([]byte(d), &kind); err != nil {
			t.Fatalf("%v\n%s", err, d)
		}
		o.kinds = append(o.kinds, kind.Kind)
		strict := func(v any) {
			t.Helper()
			if err := yaml.UnmarshalStrict([]byte(d), v); err != nil {
				t.Errorf("%s: %v\n%s", kind.Kind, err, d)
			}
		}
		switch kind.APIVersion + " " + kind.Kind {
		case "apps/v1 Deployment":
			o.deployment = &appsv1.Deployment{}
			strict(o.deployment)
		case "apps/v1 StatefulSet":
			o.set = &appsv1.StatefulSet{}
			strict(o.set)
		case "v1 ConfigMap":
			var c corev1.ConfigMap
			strict(&c)
			o.configs[c.Name] = c
		case "v1 Service":
			strict(&corev1.Service{})
		case "v1 PersistentVolumeClaim":
			strict(&corev1.PersistentVolumeClaim{})
		case "policy/v1 PodDisruptionBudget":
			strict(&policyv1.PodDisruptionBudget{})
		case "networking.k8s.io/v1 NetworkPolicy":
			var p networkingv1.NetworkPolicy
			strict(&p)
			o.policies = append(o.policies, p)
		case "monitoring.coreos.com/v1 PodMonitor":
			var m struct {
				APIVersion string `json:"apiVersion"`
				Kind       string `json:"kind"`
				Metadata   struct {
					Name   string            `json:"name"`
					Labels map[string]string `json:"labels"`
				} `json:"metadata"`
				Spec struct {
					Selector            struct{ MatchLabels map[string]string } `json:"selector"`
					PodMetricsEndpoints []struct{ Port, Path, Interval string } `json:"podMetricsEndpoints"`
				} `json:"spec"`
			}
			strict(&m)
		default:
			t.Errorf("unexpected %s %s", kind.APIVersion, kind.Kind)
		}
	}
	return o
}

func example(t *testing.T, form string) map[string]any {
	t.Helper()
	values := map[string]any{}
	if err := load(filepath.Join(chart, "values-"+form+".example.yaml"), &values); err != nil {
		t.Fatal(err)
	}
	return values
}

func rendered(t *testing.T, values map[string]any) objects {
	t.Helper()
	out, err := render(values)
	if err != nil {
		t.Fatal(err)
	}
	var docs []string
	for _, name := range slices.Sorted(maps.Keys(out)) {
		docs = append(docs, documents(out[name])...)
	}
	return decode(t, docs)
}

// TestPlainManifests: what Helm made of the chart is what is shipped, and what these tests
// look at.
func TestPlainManifests(t *testing.T) {
	for _, form := range []string{"sidecar", "shared"} {
		b, err := os.ReadFile("kubernetes/" + form + ".yaml")
		if err != nil {
			t.Fatal(err)
		}
		shipped := documents(string(b))
		decode(t, shipped)
		out, err := render(example(t, form))
		if err != nil {
			t.Fatal(err)
		}
		var here []string
		for _, name := range slices.Sorted(maps.Keys(out)) {
			here = append(here, documents(out[name])...)
		}
		if len(here) != len(shipped) {
			t.Errorf("%s: %d documents are shipped, the chart makes %d; run scripts/manifests.sh", form, len(shipped), len(here))
			continue
		}
		plain := func(docs []string) (out []string) {
			for _, d := range docs {
				j, err := yaml.YAMLToJSON([]byte(d))
				if err != nil {
					t.Fatalf("%s: %v\n%s", form, err, d)
				}
				out = append(out, string(j))
			}
			slices.Sort(out) // helm has an order of its own
			return out
		}
		chartMakes, ships := plain(here), plain(shipped)
		for i := range ships {
			if chartMakes[i] != ships[i] {
				t.Errorf("%s: a document is not what the chart makes; run scripts/manifests.sh\n%s\n%s", form, chartMakes[i], ships[i])
			}
		}
	}
}

// restricted checks what Pod Security's "restricted" asks of a container.
func restricted(t *testing.T, c *corev1.Container) {
	t.Helper()
	s := c.SecurityContext
	if s == nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || s.Privileged != nil {
		t.Errorf("%s: %+v", c.Name, s)
	}
}

func mounts(c *corev1.Container) (out []string) {
	for _, m := range c.VolumeMounts {
		out = append(out, m.Name)
	}
	return out
}

// TestSidecar: the proxy is a native sidecar that is ready before the agent starts and
// drains after it ended; the agent gets the CA's certificate and nothing else of it.
func TestSidecar(t *testing.T) {
	o := rendered(t, example(t, "sidecar"))
	spec := o.deployment.Spec.Template.Spec
	var names []string
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		names = append(names, c.Name)
		restricted(t, c)
		always := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		if always != (c.Name == "waybill") {
			t.Errorf("%s restarts: %v", c.Name, always)
		}
	}
	if !slices.Equal(names, []string{"lockdown", "waybill", "ca"}) {
		t.Fatalf("init containers %v: nothing may leave before the rules are set, and the CA is there once the proxy is ready", names)
	}
	proxy, ca, agent := &spec.InitContainers[1], &spec.InitContainers[2], &spec.Containers[0]
	if proxy.StartupProbe == nil || proxy.StartupProbe.HTTPGet.Path != "/readyz" || proxy.LivenessProbe.HTTPGet.Path != "/livez" {
		t.Error("the agent must wait until the proxy is ready; liveness is about the process alone")
	}
	restricted(t, agent)
	if *agent.SecurityContext.RunAsUser == 65532 || *proxy.SecurityContext.RunAsUser != 65532 || !*proxy.SecurityContext.ReadOnlyRootFilesystem {
		t.Error("agent and proxy need users of their own: the rules go by them")
	}
	if got := mounts(agent); !slices.Equal(got, []string{"ca"}) || !agent.VolumeMounts[0].ReadOnly {
		t.Errorf("the agent mounts %v: neither data nor secrets are for it", got)
	}
	if got := mounts(ca); !slices.Equal(got, []string{"data", "ca"}) || slices.Contains(mounts(proxy), "ca") {
		t.Errorf("%v", got)
	}
	if *spec.AutomountServiceAccountToken || *spec.ShareProcessNamespace || *spec.TerminationGracePeriodSeconds != 45 || !slices.Contains(proxy.Args, "30s") {
		t.Errorf("grace %d, args %v", *spec.TerminationGracePeriodSeconds, proxy.Args)
	}
	nft, err := os.ReadFile(filepath.Join(chart, "files/lockdown.nft"))
	if err != nil {
		t.Fatal(err)
	}
	if got := o.configs["waybill-lockdown"].Data["lockdown.nft"]; strings.TrimSpace(got) != strings.TrimSpace(string(nft)) {
		t.Errorf("the rules that are tested are not the ones that are deployed:\n%s", got)
	}
	// An emptyDir is what somebody asked for in words.
	v := example(t, "sidecar")
	if spec.Volumes[0].PersistentVolumeClaim == nil {
		t.Error("data is not on a claim")
	}
	v["data"] = map[string]any{"kind": "ephemeral"}
	if o := rendered(t, v); o.deployment.Spec.Template.Spec.Volumes[0].EmptyDir == nil || slices.Contains(o.kinds, "PersistentVolumeClaim") {
		t.Error("ephemeral data is not an emptyDir")
	}
}

// TestShared: one proxy with one journal, reached by the pods that may, which reach nothing
// else; it leaves the Service before it drains.
func TestShared(t *testing.T) {
	v := example(t, "shared")
	v["drainSeconds"], v["preStopSeconds"] = 120, 7
	o := rendered(t, v)
	spec := o.set.Spec.Template.Spec
	c := &spec.Containers[0]
	restricted(t, c)
	if *o.set.Spec.Replicas != 1 || *spec.TerminationGracePeriodSeconds != 137 || c.Lifecycle.PreStop.Sleep.Seconds != 7 || !slices.Contains(c.Args, "120s") {
		t.Errorf("%d replicas, grace %d, args %v", *o.set.Spec.Replicas, *spec.TerminationGracePeriodSeconds, c.Args)
	}
	if len(o.set.Spec.VolumeClaimTemplates) != 1 || *spec.AutomountServiceAccountToken {
		t.Error("the journal is not on a claim, or the pod has a token")
	}
	for _, kind := range []string{"Service", "PodDisruptionBudget", "PodMonitor", "ConfigMap"} {
		if !slices.Contains(o.kinds, kind) {
			t.Errorf("no %s", kind)
		}
	}
	if len(o.policies) != 2 || o.policies[0].Spec.PolicyTypes[0] != networkingv1.PolicyTypeIngress || o.policies[1].Spec.PolicyTypes[0] != networkingv1.PolicyTypeEgress {
		t.Fatalf("%+v", o.policies)
	}
	if out := o.policies[1].Spec.Egress; len(out) != 2 || out[0].Ports[0].Port.IntValue() != 7171 || out[1].Ports[0].Port.IntValue() != 53 {
		t.Errorf("clients may go to %+v", out)
	}
}

// mistakes are changes of the shared example that the chart refuses.
var mistakes = map[string]func(map[string]any){
	"no callers":           func(v map[string]any) { v["config"] = "version: 1\nroutes: []\n" },
	"unknown value":        func(v map[string]any) { v["drainSecond"] = 3 },
	"the proxy's own user": func(v map[string]any) { v["agent"] = map[string]any{"uid": 65532} },
	"unknown mode":         func(v map[string]any) { v["mode"] = "daemon" },
}

// TestChartRefuses: a mistake ends with words, not with a pod that does not start.
func TestChartRefuses(t *testing.T) {
	for what, change := range mistakes {
		v := example(t, "shared")
		change(v)
		if _, err := render(v); err == nil {
			t.Errorf("%s: not refused", what)
		}
	}
}

// TestContainersRun starts the real program as the sidecar's containers do: the arguments
// and the configuration of the manifests, with addresses and folders of this test.
func TestContainersRun(t *testing.T) {
	o := rendered(t, example(t, "sidecar"))
	spec := o.deployment.Spec.Template.Spec
	proxy, ca := &spec.InitContainers[1], &spec.InitContainers[2]
	dir, err := os.MkdirTemp("", "wb") // short: a socket's path has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg := filepath.Join(dir, "waybill.yaml")
	if err := os.WriteFile(cfg, []byte(o.configs["waybill-config"].Data["waybill.yaml"]), 0o600); err != nil {
		t.Fatal(err)
	}
	here := strings.NewReplacer("127.0.0.1:7171", "127.0.0.1:0", "0.0.0.0:7174", "127.0.0.1:0", "/ca/", dir+"/")
	args := func(c *corev1.Container) (out []string) {
		for _, a := range c.Args {
			out = append(out, here.Replace(a))
		}
		return out
	}
	bin := testkit.Binary(t)
	env := []string{"WAYBILL_CONFIG=" + cfg, "WAYBILL_DATA=" + filepath.Join(dir, "data")}
	ready := regexp.MustCompile(`metrics\s+http://([^/\s]+)`)
	p := testkit.Start(t, testkit.Command{Path: bin, Args: append(args(proxy), "--allow-any-filesystem"), Env: env, Dir: dir, ReadyLine: ready})
	addr := p.WaitLine(t, ready)[1]
	for _, probe := range []*corev1.Probe{proxy.StartupProbe, proxy.LivenessProbe, proxy.ReadinessProbe} {
		resp, err := http.Get("http://" + addr + probe.HTTPGet.Path)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d", probe.HTTPGet.Path, resp.StatusCode)
		}
	}
	if code, out, errs := testkit.Run(t, testkit.Command{Path: bin, Args: args(ca), Env: env, Dir: dir}); code != 0 {
		t.Fatalf("%v: %d %s %s", ca.Args, code, out, errs)
	}
	if pem, err := os.ReadFile(filepath.Join(dir, "bundle.pem")); err != nil || !bytes.Contains(pem, []byte("BEGIN CERTIFICATE")) || bytes.Contains(pem, []byte("PRIVATE KEY")) {
		t.Errorf("the agent's bundle: %v", err)
	}
	p.Signal(t, syscall.SIGTERM)
	if code := p.Wait(t, 30*time.Second); code != 0 {
		t.Errorf("it drains and ends with %d", code)
	}
}
