#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The QKVShare authors
# SPDX-License-Identifier: Apache-2.0
# Runs what docs/EVALUATION.md shows of TEXT, WikiText-2's test split. Scores are kept in FOLDER: a run that was
# interrupted goes on, and a run that is complete prints its tables at once. They are of one build: another one wants
# another FOLDER. On two cores all of it takes an hour or more.
# Usage: scripts/evaluate.sh TEXT FOLDER [STEP ...]
# Steps: handoff layers refine all hops depth recall pq tokens splice recall-splice; without any, all of them.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '/^# Runs/,/^# Steps/s/^# //p' "$0" >&2; exit 2; }
text=$1 folder=$2; shift 2
[ $# -gt 0 ] || set -- handoff layers refine all hops depth recall pq tokens splice recall-splice
root=$(dirname "$0")/..
program=${QKVSHARE:-$root/build/qkvshare}
mkdir -p "$folder"

calibration="$folder/calibration.qkvbal"
if [ ! -f "$calibration" ]; then  # between the first two stretches that are scored
  head -c 46000 "$text" | tail -c 40000 > "$folder/calibration.txt"
  "$program" calibrate --text "$folder/calibration.txt" -o "$calibration"
fi

measure() { # name, options of eval …
  local name=$1; shift
  "$program" eval --text "$text" --calibration "$calibration" --resume "$folder/$name.jsonl" --json "$@" > "$folder/$name.json.part"
  mv "$folder/$name.json.part" "$folder/$name.json"
  "$program" eval --text "$text" --calibration "$calibration" --resume "$folder/$name.jsonl" "$@"
}

for step in "$@"; do
  case $step in
    handoff) measure handoff --samples 24 --kv 8 --kv 7 --kv 6 --kv k=6,v=5 --kv 5 --kv k=5,v=4 --kv 4 --kv k=4,v=3 \
      --kv 3 --kv bal:k=5,v=4 --kv bal:4 --kv bal:k=4,v=3 --kv bal:k=5/3,v=4 --kv i8 --kv i8-channel --kv i8-tensor \
      --kv k=i8,v=i4 --kv i4z --kv i4-channel --kv k=i4-channel,v=i4z --kv i4 --kv like:q8_0 --kv like:q4_0 ;;
    layers)
      sensitivities="$folder/sensitivities.qkvlayers"
      if [ ! -f "$sensitivities" ]; then  # between the first two of its twelve stretches
        head -c 60000 "$text" | tail -c 40000 > "$folder/layers.txt"
        "$program" calibrate --layers --text "$folder/layers.txt" -o "$sensitivities"
      fi
      measure layers --layers "$sensitivities" --kv 4 --kv layers:4.25 --kv k=4,v=3 --kv layers:3.75 --kv k=5,v=4 \
        --kv layers:4.75 --kv k=6,v=5 --kv layers:5.75 --kv k=6,v=4 --kv 8 ;;
    refine) measure refine --score-batch 1 --kv 4+4 --kv k=4,v=3,+4 --kv 3+4 --kv 4 --kv like:q8_0 \
      --kv like:q8_0:plain ;;
    all) measure all --protocol all --samples 4 --peer llama.cpp --kv 8 --kv k=5,v=4 --kv 4 --kv bal:4 ;;
    hops) measure hops --protocol hops --samples 16 --prefix 512 --score 64 --kv 8 --kv k=5,v=4 --kv 4 ;;
    depth)
      for prefix in 4096 7936; do
        measure "depth-$prefix" --samples 2 --prefix $prefix --score-batch 1 --score 64 --kv 4+4 --kv 4 --kv 8
      done ;;
    recall)
      for protocol in copy passkey; do
        measure $protocol --protocol $protocol --samples 8 --kv 8 --kv k=5,v=4 --kv 4 --kv k=4,v=3
      done ;;
    pq)
      codebooks="$folder/codebooks.qkvpq"
      [ -f "$codebooks" ] ||
        "$program" calibrate --codebooks --text "$root/examples/long_report_source.txt" -o "$codebooks"
      measure pq --samples 3 --codebooks "$codebooks" --kv pq4 --kv 4 --kv k=4,v=3 --kv k=pq4,v=pq2 --kv pq2 ;;
    tokens) measure tokens --kv tokens:20/i8/i4 --kv tokens:random/20/i8/i4 --kv tokens:20/8/4 \
      --kv tokens:all-queries/20/8/4 --kv tokens:random/20/8/4 --kv tokens:20/8/drop --kv tokens:random/20/8/drop \
      --kv k=6,v=4 --kv 8 --kv 4 ;;
    splice)
      for weights in f32 as-is; do
        measure "splice-$weights" --protocol splice --samples 16 --weights $weights --arm none --arm rotate --arm hide \
          --arm repair=32 --arm repair=64 --arm random=38 --arm rotate@i8 --arm own:rotate --arm own:repair=32 \
          --arm full --arm auto
      done ;;
    recall-splice) measure recall-splice --protocol recall --samples 50 --weights as-is ;;
    *) echo "evaluate: no step '$step'" >&2; exit 2 ;;
  esac
done
