#!/usr/bin/env bash
# Installs what the benchmark compares with beyond Go programs, on Debian and its like as root. What cannot be installed
# is left out of the run, which says so; nothing fails for it.
set -uo pipefail

missing=()
command -v mitmdump >/dev/null 2>&1 || missing+=(mitmproxy)
{ command -v squid >/dev/null 2>&1 && squid -v 2>/dev/null | grep -q with-openssl; } || missing+=(squid-openssl)
command -v strace >/dev/null 2>&1 || missing+=(strace)
[ ${#missing[@]} -gt 0 ] || exit 0
if ! command -v apt-get >/dev/null 2>&1 || [ "$(id -u)" -ne 0 ]; then
  echo "Not installed, so not measured: ${missing[*]} (Debian packages)." >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# The packages' own services are not wanted: the benchmark starts what it needs, and ends it.
if [ ! -e /usr/sbin/policy-rc.d ]; then
  printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
fi
apt-get -q update >/dev/null 2>&1 </dev/null
for p in "${missing[@]}"; do
  if apt-get -q -y --no-install-recommends install "$p" >/dev/null 2>&1 </dev/null; then
    echo "Installed: $p" >&2
  else
    echo "Cannot be installed, so not measured: $p" >&2
  fi
done
exit 0
