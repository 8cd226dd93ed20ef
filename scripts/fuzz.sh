#!/usr/bin/env bash
# Builds the fuzz targets of tests/fuzz with clang, libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, and runs
# each for SECONDS, as many at once as there are CPUs. Without clang it says so and succeeds: the corpus is replayed by
# the ordinary tests all the same.
# Usage: scripts/fuzz.sh [BUILD_FOLDER [SECONDS]]        (default: build-fuzz 60)
# A finding is left as BUILD_FOLDER/findings/<target>-crash-…, and the exit status is 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:-build-fuzz}
seconds=${2:-60}
targets=(card_fuzz broker_message_fuzz segment_fuzz flow_file_fuzz)

if ! command -v clang++ >/dev/null || ! echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
  clang++ -x c++ -fsanitize=fuzzer -o /dev/null - 2>/dev/null; then
  echo "fuzz: skipped, there is no clang with libFuzzer (Debian, Ubuntu: clang, libclang-rt-dev)"
  exit 0
fi

generator=(); command -v ninja >/dev/null && generator=(-G Ninja)
mkdir -p "$build"
prefix=$(bash scripts/setup.sh --paths | sed -n 's/^LLAMA_PREFIX=//p')  # found by the name of the usual compiler
cmake -S . -B "$build" "${generator[@]}" -Wno-dev -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DQKV_LLAMA_PREFIX="$prefix" \
  -DCMAKE_CXX_FLAGS=-fno-sanitize-recover=all \
  -DQKV_SANITIZE=fuzzer-no-link,address,undefined >"$build/configure.log" 2>&1 || { cat "$build/configure.log"; exit 1; }
cmake --build "$build" -j "$(nproc)" --target "${targets[@]}" >"$build/build.log" 2>&1 || { tail -n 40 "$build/build.log"; exit 1; }

one() { # target: run it, say how many inputs it saw
  local target=$1 corpus=() seeds
  for seeds in tests/golden "tests/fuzz/corpus/$target" examples; do
    case $target:$seeds in
      card_fuzz:tests/golden | segment_fuzz:tests/golden | flow_file_fuzz:examples | *:tests/fuzz/corpus/*)
        if [ -d "$seeds" ]; then corpus+=("$seeds"); fi ;;
    esac
  done
  mkdir -p "$build/corpus/$target" "$build/findings"
  if ! "$build/tests/$target" -max_total_time="$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1 -artifact_prefix="$build/findings/$target-" "$build/corpus/$target" "${corpus[@]}" \
    >"$build/$target.log" 2>&1; then
    tail -n 60 "$build/$target.log"
    echo "fuzz: $target failed (whole log: $build/$target.log)"
    return 1
  fi
  echo "fuzz: $target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$build/$target.log") inputs in $seconds s, no finding"
}
export -f one
export build seconds
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -c 'one {}'
