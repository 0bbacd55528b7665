#!/usr/bin/env bash
# Makes deploy/kubernetes (or DIR) from the chart, with the Helm of tools/go.mod. go test ./deploy checks that the chart still gives
# what is there, and make test-long that this script does.
set -euo pipefail
out=${1:-}
cd "$(dirname "$0")/.."
out=${out:-deploy/kubernetes}
for form in sidecar shared; do
  {
    echo "# Made by Helm from deploy/helm/waybill with values-$form.example.yaml (scripts/manifests.sh). Replace image, agent and configuration."
    go tool -modfile=tools/go.mod helm template waybill deploy/helm/waybill --namespace agents --kube-version 1.30.0 -f "deploy/helm/waybill/values-$form.example.yaml" | grep -v '^# Source:' | sed '1{/^---$/d}'
  } >"$out/$form.yaml"
done
