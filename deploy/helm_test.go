package deploy

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"sigs.k8s.io/yaml"
)

// kubeVersion is the oldest Kubernetes that the chart takes (Chart.yaml).
const kubeVersion = "1.30.0"

// helmCommand runs the real Helm of tools/go.mod, away from the settings of whoever runs the tests.
func helmCommand(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	helm, err := helmBinary()
	if err != nil {
		t.Fatalf("helm of tools/go.mod: %v", err)
	}
	cmd := exec.Command(helm, args...)
	home := t.TempDir()
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "HELM_CACHE_HOME=" + home, "HELM_CONFIG_HOME=" + home, "HELM_DATA_HOME=" + home, "KUBECONFIG=" + filepath.Join(home, "none")}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// helmBinary builds Helm at the version of tools/go.mod, which takes about three and a half
// minutes of CPU the first time, and then comes from Go's build cache.
var helmBinary = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "tool", "-modfile=../tools/go.mod", "-n", "helm").Output()
	return strings.TrimSpace(string(out)), err
})

func helmTemplate(t *testing.T, values map[string]any) (string, error) {
	t.Helper()
	text, err := yaml.Marshal(values)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	out, errs, err := helmCommand(t, "template", "waybill", chart, "--namespace", "agents", "--kube-version", kubeVersion, "-f", file)
	if err != nil {
		t.Logf("helm: %s", errs)
	}
	return out, err
}

var source = regexp.MustCompile(`(?m)^# Source: .*\n`)

// texts are the documents of manifests, sorted, each byte for byte as it was rendered but
// for blank lines around it.
func texts(manifests string) []string {
	docs := documents(source.ReplaceAllString(manifests, ""))
	for i := range docs {
		docs[i] = strings.TrimSpace(docs[i])
	}
	slices.Sort(docs)
	return docs
}

// valueSets turn every branch of the chart.
var valueSets = map[string]func(map[string]any){
	"as it is":  func(map[string]any) {},
	"ephemeral": func(v map[string]any) { v["data"] = map[string]any{"kind": "ephemeral"} },
	"claim and class": func(v map[string]any) {
		v["data"] = map[string]any{"claimName": "mine", "storageClassName": "fast", "size": "1Gi"}
	},
	"storage class": func(v map[string]any) { v["data"] = map[string]any{"storageClassName": "fast"} },
	"no secret":     func(v map[string]any) { delete(v, "secretName") },
	"no monitor":    func(v map[string]any) { v["monitor"] = map[string]any{"enabled": false} },
	"no lockdown":   func(v map[string]any) { v["lockdown"] = map[string]any{"enabled": false} },
	"no policies":   func(v map[string]any) { v["networkPolicy"] = map[string]any{"enabled": false} },
	"no wait":       func(v map[string]any) { v["preStopSeconds"], v["drainSeconds"] = 0, 3600 },
	"image": func(v map[string]any) {
		v["image"] = map[string]any{"repository": "registry.example:5000/a/b", "tag": "1.2.3@sha256:00", "pullPolicy": "Always"}
	},
	"clients": func(v map[string]any) {
		v["networkPolicy"] = map[string]any{"clientLabels": map[string]any{"b": "2", "a": "yes", "waybill.dev/client": nil}, "monitoringNamespace": "m"}
	},
	"command": func(v map[string]any) {
		v["agent"] = map[string]any{"name": "a", "image": "i", "uid": 4242, "command": []any{"sh", "-c", "echo \"<&>\" 'é'\n\t\\"}}
	},
	"resources": func(v map[string]any) {
		v["resources"] = map[string]any{"cpu": "1", "memory": "1Gi", "memoryLimit": "2Gi"}
	},
	"configuration's end": func(v map[string]any) {
		v["config"] = v["config"].(string) + "\n\n# {{ not a template }} \"callers:\" 'é'\n"
	},
}

// TestHelm, in make test-long: the real Helm lints the chart, makes of it byte for byte what
// render makes – so that the other tests here are about what users get – refuses what render
// refuses, and made the manifests that are shipped.
func TestHelm(t *testing.T) {
	if os.Getenv("WAYBILL_TEST_LONG") == "" {
		return // three and a half minutes of CPU to compile
	}
	for _, form := range []string{"sidecar", "shared"} {
		if out, errs, err := helmCommand(t, "lint", "--strict", "--quiet", "--kube-version", kubeVersion, chart, "-f", filepath.Join(chart, "values-"+form+".example.yaml")); err != nil {
			t.Errorf("helm lint, %s: %v\n%s%s", form, err, out, errs)
		}
		for name, change := range valueSets {
			values := example(t, form)
			change(values)
			want, err := helmTemplate(t, values)
			if err != nil {
				t.Errorf("%s, %s: helm: %v", form, name, err)
				continue
			}
			out, err := render(values)
			if err != nil {
				t.Errorf("%s, %s: %v", form, name, err)
				continue
			}
			var here []string
			for _, text := range out {
				here = append(here, texts(text)...)
			}
			slices.Sort(here)
			there := texts(want)
			if len(there) < 2 || len(there) != len(here) {
				t.Errorf("%s, %s: helm makes %d documents, render %d", form, name, len(there), len(here))
				continue
			}
			for i := range there {
				if there[i] != here[i] {
					t.Errorf("%s, %s: helm makes\n%q\nrender makes\n%q", form, name, there[i], here[i])
				}
			}
		}
	}
	for name, change := range mistakes {
		values := example(t, "shared")
		change(values)
		if out, err := helmTemplate(t, values); err == nil {
			t.Errorf("%s: helm does not refuse it:\n%s", name, out)
		}
	}
	dir := t.TempDir()
	cmd := exec.Command("../scripts/manifests.sh", dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("scripts/manifests.sh: %v\n%s", err, out)
	}
	for _, form := range []string{"sidecar", "shared"} {
		made, errA := os.ReadFile(filepath.Join(dir, form+".yaml"))
		shipped, errB := os.ReadFile("kubernetes/" + form + ".yaml")
		if errA != nil || errB != nil || !bytes.Equal(made, shipped) {
			t.Errorf("kubernetes/%s.yaml is not what helm makes (%v, %v); run scripts/manifests.sh", form, errA, errB)
		}
	}
}
