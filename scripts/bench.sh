#!/usr/bin/env bash
# Builds Waybill, the base it is compared with and the driver, and runs the benchmark. See `make help` and
# internal/bench. Settings, all optional:
#   QUICK=1 | FULL=1     about 3 minutes | the whole cross product, about 45 minutes (default: about 20)
#   BENCH_ONLY=REGEXP    scenarios by name, as intercepted/1KiB/c16/keep-alive
#   BENCH_SYSTEMS=REGEXP systems by name: waybill, waybill-relaxed, waybill-ram, waybill-sidecar, waybill-guard, waybill-noguard, nethttp, squid, mitmproxy
#   BENCH_DIR=FOLDER     where the journal of the strict runs lies: on the disk to measure (default: the temporary folder)
#   BENCH_RIVALS=0       leave out what comes from Debian packages
#   BENCH_NOTE="…"       text to print beside the numbers, such as what else the machine did
#   BENCH_ARGS="…"       further flags of the driver: -rounds 9 -window 2s -log-level warn -compare before=PATH …
#   JSON=1               JSON on standard output instead of tables
#   WRITE=1              also write docs/benchmarks.md
#   PROFILE=1            instead, profile Waybill (strict) at 1, 16 and 64 clients into bin/bench/profiles
set -euo pipefail
cd "$(dirname "$0")/.."
out=bin/bench
mkdir -p "$out"

CGO_ENABLED=0 go build -trimpath -o "$out/waybill" ./cmd/waybill
CGO_ENABLED=0 go build -trimpath -tags waybill_controls -o "$out/waybill-controls" ./cmd/waybill
CGO_ENABLED=0 go build -trimpath -o "$out/waybill-bench" ./internal/bench/cmd/waybill-bench
# The base is a module of its own, so that goproxy stays out of every package but proxy.
CGO_ENABLED=0 go -C internal/bench/baseline build -trimpath -o "$PWD/$out/goproxy" .

args=(-waybill "$out/waybill" -goproxy "$out/goproxy")
[ -z "${BENCH_DIR:-}" ] || args+=(-dir "$BENCH_DIR")
# shellcheck disable=SC2206 # flags, split at blanks on purpose
more=(${BENCH_ARGS:-})

if [ -n "${PROFILE:-}" ]; then
  exec "$out/waybill-bench" profile "${args[@]}" "${more[@]}"
fi

systems=${BENCH_SYSTEMS:-}
if [ "${BENCH_RIVALS:-1}" = 0 ]; then
  systems=${systems:-^(waybill|nethttp)}
else
  scripts/bench-deps.sh
fi

command="make bench"
for name in QUICK FULL BENCH_ONLY BENCH_SYSTEMS BENCH_RIVALS BENCH_ARGS; do
  [ -z "${!name:-}" ] || command+=" $name='${!name}'"
done
[ -z "${QUICK:-}" ] || args+=(-size quick)
[ -z "${FULL:-}" ] || args+=(-size full)
[ -z "${JSON:-}" ] || args+=(-json)
[ -z "${WRITE:-}" ] || args+=(-write docs/benchmarks.md)
exec "$out/waybill-bench" run "${args[@]}" -controls "$out/waybill-controls" -only "${BENCH_ONLY:-}" -systems "$systems" -note "${BENCH_NOTE:-}" -command "$command" "${more[@]}"
