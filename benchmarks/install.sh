#!/usr/bin/env bash
# Builds the wheel, installs it into fresh environments outside of this folder, and runs the commands there that need no
# torch, in an empty folder: every Python that is found, with the newest and with the lowest dependencies that are allowed.
#
#   bash benchmarks/install.sh [PYTHON...]     default: 3.11 3.12 3.13; one that is missing is named and passed over
#
# Exit codes: 1 a step failed; 5 none of the Pythons is here; 69 the package index cannot be reached.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BIN=${BIN:-.venv/bin}
UNREACHED='failed to fetch|error sending request|dns error|request failed'
uv() { "$BIN/python" -m uv "$@"; }
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

# A copy, so that nothing that lies about here gets into the wheel, and a wheel from the sdist, as an index has both.
git ls-files -z | xargs -0 tar -c --null -f - 2>/dev/null | (mkdir "$place/source" && tar -x -C "$place/source")
if ! uv build --quiet --out-dir "$place/dist" "$place/source" 2>"$place/err"; then
  echo "FAILED: building the wheel: $(tail -n 3 "$place/err")" >&2
  ! grep -qiE "$UNREACHED" "$place/err" || exit 69
  exit 1
fi
wheel=$(echo "$place"/dist/*.whl)
echo "built $(basename "$wheel"), $(($(stat -c %s "$wheel") / 1024)) kB"

python_of() { # the interpreter of a version, where there is one
  local found
  for found in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python; do
    if command -v "$found" >/dev/null && "$found" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      command -v "$found"
      return
    fi
  done
  return 1
}

expect() { # CODE WORDS COMMAND...: the exit code, and what has to be in what it says
  local code=$1 words=$2 got=0
  shift 2
  "$@" >"$place/out" 2>"$place/err" || got=$?
  if [ "$got" != "$code" ] || ! grep -qF -- "$words" "$place/out" "$place/err"; then
    echo "FAILED: $* ended with $got, expected $code and '$words':" >&2
    tail -n 5 "$place/out" "$place/err" >&2
    return 1
  fi
}

try() { # ENVIRONMENT DEPENDENCIES: the commands of a first hour, without torch
  local asa=$1/bin/asa
  (
    mkdir "$1/empty"
    cd "$1/empty"
    unset PYTHONPATH PYTHONDONTWRITEBYTECODE # each command would compile anew all that it imports
    expect 0 "asa 0." "$asa" --version
    expect 0 "solved 2 variables" "$asa" doctor
    expect 0 "a100-nvlink-8" "$asa" plan resnet50 --gpus 8 --cluster a100-nvlink-8
    expect 0 '"solver": "ilp (HiGHS)' "$asa" plan resnet50 --gpus 2 --solver ilp --json
    expect 0 "resnet50" "$asa" explain --why-not ddp
    expect 0 '"kind": "timeline"' "$asa" simulate --json
    [ "$2" = highest ] || exit 0 # the others use no dependency in a way of their own
    expect 0 "torch.distributed" "$asa" export --to torch
    expect 0 "torchrun" "$asa" launch slurm
    expect 0 "kind: Job" "$asa" launch k8s
    expect 0 "placement_group" "$asa" launch ray
    expect 0 "a100-nvlink-8" "$asa" cluster list
    expect 0 "settings have their defaults" "$asa" config show plan
    expect 5 "asa-parallel[train]" "$asa" plan densenet121
    expect 5 "asa-parallel[train]" "$asa" profile resnet50
    expect 5 "asa-parallel[train]" "$asa" train
    expect 5 "asa-parallel[train]" "$1/bin/python" -c "
import sys, asa
try:
    asa.parallelize
except asa.AsaError as error:
    print(error)
    sys.exit(error.exit_code)"
  )
}

versions=("$@")
[ $# -gt 0 ] || versions=(3.11 3.12 3.13)
tried=0
for version in "${versions[@]}"; do
  if ! python=$(python_of "$version"); then
    echo "passed over: there is no Python $version here"
    continue
  fi
  for which in highest lowest-direct; do
    home=$place/$version-$which
    uv venv --quiet --python "$python" "$home"
    # Of what it depends on, directly: those of the wheel would be no longer "direct" to the resolver.
    if ! uv pip install --quiet --python "$home/bin/python" --resolution "$which" --only-binary :all: \
        --requirements "$place/source/pyproject.toml" 2>"$place/err" ||
      ! uv pip install --quiet --python "$home/bin/python" --no-deps "$wheel" 2>>"$place/err"; then
      echo "FAILED: Python $version, $which: $(tail -n 3 "$place/err")" >&2
      ! grep -qiE "$UNREACHED" "$place/err" || exit 69
      exit 1
    fi
    try "$home" "$which"
    echo "ok: Python $version, $which dependencies, $(du -sm "$home" | cut -f1) MB:" \
      "$(uv pip list --quiet --python "$home/bin/python" | awk '$1 ~ /^(pulp|PuLP|highspy|numpy|pydantic)$/ {printf "%s %s  ", $1, $2}')"
    rm -rf "$home"
    tried=$((tried + 1))
  done
done
[ "$tried" -gt 0 ] || { echo "no Python of ${versions[*]} is here" >&2; exit 5; }
