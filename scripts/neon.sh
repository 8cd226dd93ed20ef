#!/usr/bin/env bash
# Cross-compiles the kernels for aarch64 and runs their tests under qemu-user, on a CPU with dot product and on one without.
# Usage: scripts/neon.sh [build folder]      default: build-neon
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build-neon}

packages=(g++-aarch64-linux-gnu qemu-user
  libhwy-dev:arm64 libxxhash-dev:arm64 libgtest-dev:arm64 libgmock-dev:arm64 librapidcheck-dev:arm64)
missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  install="dpkg --add-architecture arm64 && apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" = 0 ]; then sudo=; elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo=sudo; else
    echo "neon: these packages are missing and need root to install. Run this once, then again what you ran:" >&2
    echo "  sudo sh -c '$install'" >&2
    exit 2
  fi
  echo "neon: installing ${#missing[@]} packages: ${missing[*]}"
  log=$(mktemp)
  $sudo env DEBIAN_FRONTEND=noninteractive sh -c "$install" >"$log" 2>&1 || {
    tail -n 20 "$log" >&2; echo "neon: apt-get failed (whole log: $log)" >&2; exit 1; }
  rm -f "$log"
fi

cmake -S tests/neon -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >/dev/null
cmake --build "$build"
for cpu in max cortex-a53; do # with dot product, without
  for test in codec attention; do
    echo "neon: ${test}_test on $cpu"
    qemu-aarch64 -cpu "$cpu" "$build/${test}_test" --gtest_brief=1
  done
done
