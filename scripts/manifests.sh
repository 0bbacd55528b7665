#!/usr/bin/env bash
# Makes deploy/kubernetes from the chart, with the real Helm (a program called helm, version 3 or 4). go test ./deploy checks
# that the chart still gives what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
for form in sidecar shared; do
  {
    echo "# Made by Helm from deploy/helm/waybill with values-$form.example.yaml (scripts/manifests.sh). Replace image, agent and configuration."
    helm template waybill deploy/helm/waybill --namespace agents --skip-schema-validation=false -f "deploy/helm/waybill/values-$form.example.yaml" | grep -v '^# Source:' | sed '1{/^---$/d}'
  } >"deploy/kubernetes/$form.yaml"
done
