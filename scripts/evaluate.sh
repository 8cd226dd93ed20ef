#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The QKVShare authors
# SPDX-License-Identifier: Apache-2.0
# Runs what docs/EVALUATION.md shows. Scores are kept in FOLDER: a run that was interrupted goes on, and a run that is
# complete prints its tables at once. Alone on two cores all of it takes about three quarters of an hour.
# Usage: scripts/evaluate.sh TEXT FOLDER [handoff|layers|refine|all|hops|depth|recall ...]     TEXT: WikiText-2's test split
set -euo pipefail
[ $# -ge 2 ] || { sed -n 4,7p "$0" | cut -c3- >&2; exit 2; }
text=$1 folder=$2; shift 2
[ $# -gt 0 ] || set -- handoff layers refine all hops depth recall
program=${QKVSHARE:-$(dirname "$0")/../build/qkvshare}
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
    handoff) measure handoff --samples 24 --kv 8 --kv k=6,v=5 --kv k=5,v=4 --kv 4 --kv k=4,v=3 --kv bal:k=5,v=4 \
      --kv bal:4 --kv bal:k=4,v=3 --kv bal:k=5/3,v=4 --kv i8 --kv i8-channel --kv i8-tensor --kv k=i8,v=i4 --kv i4z \
      --kv i4 --kv like:q8_0 --kv like:q4_0 ;;
    layers)
      sensitivities="$folder/sensitivities.qkvlayers"
      [ -f "$sensitivities" ] || "$program" calibrate --layers --text "$folder/calibration.txt" -o "$sensitivities"
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
    *) echo "evaluate: no step '$step'" >&2; exit 2 ;;
  esac
done
