#!/usr/bin/env bash
# Runs every fuzz target of the module for the given time each (default 10s). A crasher is left under the package's
# testdata/fuzz, to be committed with its fix.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-10s}

count=0
failed=()
while read -r pkg; do
  # The list also prints "ok PACKAGE TIME"; the targets are the lines that begin with Fuzz.
  while read -r target; do
    count=$((count + 1))
    echo "== $pkg $target ($time)"
    go test -run='^$' -fuzz="^$target\$" -fuzztime="$time" "$pkg" || failed+=("$pkg $target")
  done < <(go test -list='^Fuzz' "$pkg" | grep '^Fuzz' || true)
done < <(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | grep .)

echo
echo "$((count - ${#failed[@]})) passed, ${#failed[@]} failed"
if [ "$count" -eq 0 ]; then
  echo "no fuzz target was found" >&2
  exit 1
fi
if [ ${#failed[@]} -gt 0 ]; then
  printf '%s\n' "${failed[@]}" >&2
  exit 1
fi
