#!/usr/bin/env bash
# The sample documents of docs/samples, from real runs of a small network on this machine. Minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
BIN=$(cd "${BIN:-.venv/bin}" && pwd)
SAMPLES=$PWD/docs/samples
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$SAMPLES"
cd "$WORK"

sample() { "$BIN/asa" "${@:2}" --json >"$WORK/out.json" && mv "$WORK/out.json" "$SAMPLES/$1.json" && echo "$1"; }

sample cluster-measure cluster measure --gpus 2 --time-limit 20s
sample cluster-list cluster list
sample cluster-show cluster show a100-nvlink-8
sample profile profile cnn --global-batch 16 --time-limit 20s --max-tensor-degree 2
sample plan plan --gpus 2
sample explain explain
sample simulate simulate
sample verify verify
sample train train --data synthetic --epochs 1 --steps-per-epoch 10 --out runs/train/cnn
sample export export
sample launch launch slurm --train '--epochs 90 --data cifar100' --time 12h
sample bench bench --models cnn --global-batch 16 --data synthetic --budget 20s --out runs/bench/cnn
sample bench-truth bench truth
sample doctor doctor
sample config-show config show plan
