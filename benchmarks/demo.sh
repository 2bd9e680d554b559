#!/usr/bin/env bash
# The main job, once, on what this machine has: profile, plan, train, compare. `make demo` sets the variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BIN=$(cd "${BIN:-.venv/bin}" && pwd)
MODEL=${MODEL:-vgg16} GPUS=${GPUS:-2} BATCH=${BATCH:-64} DEVICE=${DEVICE:-auto}
ROOT=$PWD
# Its own folder: what it measures does not take the place of the profiles in the repository.
mkdir -p runs/demo && rm -rf runs/demo/train runs/demo/bench
cd runs/demo

step() { printf '\n== %s\n$ asa %s\n' "$1" "${*:2}"; }
asa() { "$BIN/asa" "$@"; }
run() { step "$@"; asa "${@:2}"; }

step "1 of 5: what messages cost here" cluster measure --gpus "$GPUS"
asa cluster measure --gpus "$GPUS" --device "$DEVICE" --time-limit 25s -o profiles/cluster.demo.json >cluster.txt
run "2 of 5: time every component" profile "$MODEL" --global-batch "$BATCH" --device "$DEVICE" --time-limit 60s \
  --max-tensor-degree "$GPUS"
run "3 of 5: choose" plan "$MODEL" --gpus "$GPUS" --cluster profiles/cluster.demo.json
run "4 of 5: train under the plan" train --data synthetic --epochs 1 --steps-per-epoch 15 --out train
run "5 of 5: compare with every baseline" bench --models "$MODEL" --gpus "$GPUS" --global-batch "$BATCH" --device "$DEVICE" \
  --cluster profiles/cluster.demo.json --data synthetic --budget 110s --out bench

cp bench/report.html "$ROOT/report.html"
printf '\nreport.html is the page to open; plans, figures and numbers are in runs/demo.\n'
