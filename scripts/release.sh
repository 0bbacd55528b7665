#!/usr/bin/env bash
# Makes what a release consists of, in bin/release: for each platform an archive with the static binary, manual pages,
# completions, units, licence; an SBOM (SPDX 2.3, from the build information that the binary itself carries); SHA256SUMS.
# The same source and version give the same bytes.
#   scripts/release.sh v1.2.3 [linux/amd64 linux/arm64 …]
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: scripts/release.sh VERSION [OS/ARCH …]}
shift
platforms=("$@")
[ ${#platforms[@]} -gt 0 ] || platforms=(linux/amd64 linux/arm64) # the journal needs Linux
out=$(realpath -m "${OUT:-bin/release}")
[ -n "${OUT:-}" ] || rm -rf "$out"
mkdir -p "$out"
epoch=${SOURCE_DATE_EPOCH:-0}

# Pages and completions are made by a binary of this machine.
pages=$(mktemp -d)
trap 'rm -rf "$pages"' EXIT
CGO_ENABLED=0 go build -trimpath -ldflags "-s -w -X main.version=$version" -o "$pages/waybill" ./cmd/waybill
"$pages/waybill" man "$pages/man"
mkdir "$pages/completions"
for shell in bash zsh fish powershell; do "$pages/waybill" completion "$shell" >"$pages/completions/waybill.$shell"; done

for platform in "${platforms[@]}"; do
  os=${platform%/*} arch=${platform#*/}
  name=waybill_${version#v}_${os}_${arch}
  mkdir "$out/$name"
  CGO_ENABLED=0 GOOS=$os GOARCH=$arch go build -trimpath -ldflags "-s -w -X main.version=$version" -o "$out/$name/waybill" ./cmd/waybill
  cp -r LICENSE README.md CHANGELOG.md "$pages/man" "$pages/completions" "$out/$name/"
  mkdir "$out/$name/systemd" && cp deploy/systemd/* "$out/$name/systemd/"
  scripts/sbom.py "$out/$name/waybill" "$version" "$epoch" >"$out/$name.spdx.json"
  tar --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX,go-w -C "$out" -cf - "$name" | gzip -n9 >"$out/$name.tar.gz"
  rm -rf "${out:?}/$name"
done
(cd "$out" && sha256sum -- *.tar.gz *.spdx.json >SHA256SUMS)
ls -l "$out"
