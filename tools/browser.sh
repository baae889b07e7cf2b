#!/usr/bin/env bash
# Makes a browser available to the tests that look at pages, where this machine allows it; never fails.
set -u
if command -v chromium >/dev/null 2>&1; then
  echo "browser: $(command -v chromium)"
  exit 0
fi
skip() { echo "browser skipped: $1; page tests that need one will say so"; exit 0; }
command -v apt-get >/dev/null 2>&1 || skip "no apt-get here"
[ "$(id -u)" = 0 ] || skip "installing chromium needs root"
log=$(mktemp)
if timeout 300 apt-get update >"$log" 2>&1 &&
  DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y --no-install-recommends chromium >>"$log" 2>&1; then
  echo "browser: installed $(command -v chromium)"
else
  skip "apt-get could not install chromium ($(tail -n 1 "$log"))"
fi
