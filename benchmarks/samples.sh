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
sample train-rehearse train --rehearse 1 --gpus 2
sample export export
sample launch launch slurm --train '--epochs 90 --data cifar100' --time 12h
sample bench bench --models cnn --global-batch 16 --data synthetic --budget 20s --out runs/bench/cnn
"$BIN/python" - <<'PY' # the plans of that comparison, as if somebody had foretold them of this machine
import dataclasses
from datetime import date
from pathlib import Path

import asa
from asa.ir import codec
from asa.ir.plan import Plan
from asa.ir.sealed import FIRST, Claim, sealed
from asa.profiler.machine import cpu_name

made = {path.name.split(".")[1]: codec.load(Plan, path) for path in Path("runs/bench/cnn/plans").glob("*.json")}
order = sorted(made, key=lambda name: made[name].prediction.step_time_s)
Path("sealed").mkdir()
with Path("sealed/here.jsonl").open("w") as file:
    previous = FIRST
    for place, name in enumerate(order, 1):
        plan = dataclasses.replace(made[name], baselines=())
        claim = Claim(machine="here", device_name=cpu_name(), num_devices=2, num_nodes=1, strategy=name, plan=plan,
                      place=place, among=len(order))
        line = sealed(claim, revision=1, written=date.today().isoformat(), asa_version=asa.__version__,
                      previous=previous)
        previous = codec.parse(line, source="the seal")["sha256"]
        file.write(line)
PY
sample bench-check-sealed bench --check-sealed --sealed sealed --gpus 2 --device cpu --budget 20s
sample doctor doctor
sample config-show config show plan
