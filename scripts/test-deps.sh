#!/usr/bin/env bash
# Installs the programs that the tests run, where they are missing: quick and silent when all are there.
# On Debian and its like as root; elsewhere it says what is missing and fails, since a test that cannot
# run its program fails too. A new program gets a line here, and never a skip in a test.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
programs=()

# need PROGRAM PACKAGE: the program that a test starts, the Debian package that has it.
need() {
  if ! command -v "$1" >/dev/null 2>&1; then
    programs+=("$1")
    missing+=("$2")
  fi
}

need gcc gcc                 # go test -race links with the C compiler
need curl curl               # a client through the proxy
need git git                 # a client through the proxy, and git http-backend as its upstream
need openssl openssl         # looks at certificates from outside
need mkfs.ext4 e2fsprogs     # a disk of its own that fills up and loses its power
need losetup mount              # and one that remembers the order of what it was told
need strace strace           # orders fsync and the first write of a dispatch
need python3 python3         # a client through the proxy
need ssh openssh-client      # a client of the SSH endpoint; scp and ssh-keygen come with it
need rsync rsync             # the same
need plink putty-tools       # clients that make a success of a missing exit status
need dbclient dropbear-bin   # the same
need ssh-audit ssh-audit     # judges the algorithms of both sides
# Debian's interpreter: python3 in the PATH may be one that lacks Debian's packages.
if ! /usr/bin/python3 -c 'import paramiko' >/dev/null 2>&1; then
  programs+=(paramiko)
  missing+=(python3-paramiko) # a client of the SSH endpoint that knows no certificates
fi
if [ ! -x /usr/sbin/sshd ]; then
  programs+=(sshd)
  missing+=(openssh-server)  # a target for commands, started by the tests as a process of their own
fi
need node nodejs             # a client through the proxy
need wget wget               # the same
need javac default-jdk-headless  # the same: the clients of the JDK, run from their source
for module in requests httpx h2; do
  # Of the system's Python, which has Debian's packages; another one may come first in PATH.
  if ! /usr/bin/python3 -c "import $module" >/dev/null 2>&1; then
    programs+=("python3 with $module")
    missing+=("python3-$module")
  fi
done
need promtool prometheus      # rules, alerts and the queries of the dashboard
need systemd-analyze systemd  # reads and rates the unit
need ip iproute2              # the namespace in which the sidecar's rules are tried
need unshare util-linux
need dbus-daemon dbus-daemon  # the bus of a keyring
need nft nftables             # the owner-UID rules of the sidecar, in a network namespace
if ! { command -v nc >/dev/null 2>&1 && nc -h 2>&1 | grep -q OpenBSD; }; then
  programs+=(nc)
  missing+=(netcat-openbsd)  # raw bytes to the proxy, as no client library would send them
fi
# The C library's headers come with no program of their own.
if ! echo '#include <stdlib.h>' | "${CC:-gcc}" -E -o /dev/null - >/dev/null 2>&1; then
  programs+=("libc headers")
  missing+=(libc6-dev)
fi

# The MCP inspector's command line comes from npm, with some 150 MB of its own: only the long tests run it.
inspector_version=0.15.0
inspector() {
  [ -n "${WAYBILL_TEST_LONG:-}" ] || return 0
  local cache=${XDG_CACHE_HOME:-$HOME/.cache}
  if [ "$(uname)" = Darwin ]; then cache=$HOME/Library/Caches; fi
  local dir=$cache/waybill-testkit/mcp-inspector
  if grep -q "\"version\": \"$inspector_version\"" "$dir/node_modules/@modelcontextprotocol/inspector/package.json" 2>/dev/null; then return 0; fi
  mkdir -p "$dir"
  npm install --prefix "$dir" --ignore-scripts --no-audit --no-fund --loglevel=error "@modelcontextprotocol/inspector@$inspector_version" >&2
}

# The client libraries of internal/e2e/testdata/sdk, and newer versions of Node than Debian's: half a gigabyte, for the long tests only.
libraries() {
  [ -n "${WAYBILL_TEST_LONG:-}" ] || return 0
  local list=internal/e2e/testdata/sdk/package.json
  local cache=${XDG_CACHE_HOME:-$HOME/.cache}
  if [ "$(uname)" = Darwin ]; then cache=$HOME/Library/Caches; fi
  local dir=$cache/waybill-testkit/sdk
  if cmp -s "$list" "$dir/installed.json"; then return 0; fi
  mkdir -p "$dir"
  cp "$list" "$dir/package.json"
  npm install --prefix "$dir" --ignore-scripts --no-audit --no-fund --no-package-lock --loglevel=error >&2
  cp "$list" "$dir/installed.json"
}
if [ -n "${WAYBILL_TEST_LONG:-}" ]; then
  need npm npm               # installs the MCP inspector and client libraries
  need ansible-playbook ansible-core # a client of the SSH endpoint
fi

[ ${#missing[@]} -gt 0 ] || { inspector; libraries; exit 0; }

echo "The tests need: ${programs[*]}" >&2
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" -ne 0 ]; then
  echo "Install them (Debian packages: ${missing[*]}), then run this again." >&2
  exit 1
fi

export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# The packages' own services are not wanted: the tests start what they need, and end it.
if [ ! -e /usr/sbin/policy-rc.d ]; then
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
  trap 'rm -f "$log" /usr/sbin/policy-rc.d' EXIT
fi
if ! { apt-get -o Acquire::Retries=3 -q update && apt-get -o Acquire::Retries=3 -q -y --no-install-recommends install "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
  cat "$log" >&2
  exit 1
fi
echo "Installed: ${missing[*]}" >&2
inspector
libraries
