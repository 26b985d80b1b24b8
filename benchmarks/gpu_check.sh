#!/usr/bin/env bash
# Everything that can only be known on a GPU, in one run of less than eight minutes: the kernels against sums written
# out, the system on the device against the CPU, decode steps in graphs against eager ones, then figures. Every part
# runs, whatever the one before it said; the last line tells which failed, and the exit status is not zero if any did.
# What torch.compile makes takes longer: python -m pytest -m gpu tests/gpu/test_graphs.py -k compiled
#
# It wants a CUDA build of torch, the extras `gpu` and `dev`, and a compiler (nvcc, ninja): FlashInfer builds its
# kernels when they are first used. PY names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-python}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
failed=()

# part NAME SECONDS COMMAND...
part() {
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  echo "== $name"
  timeout --kill-after=10 "$limit" "$@"
  status=$?
  if [ $status -eq 0 ]; then
    echo "-- $name: ok in $((SECONDS - began)) s"
  else
    echo "-- $name: FAILED with status $status after $((SECONDS - began)) s (limit $limit s)"
    failed+=("$name")
  fi
}

"$PY" - <<'PYTHON' || exit 1
import importlib.metadata as metadata
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("there is no CUDA device")
try:
    flashinfer = metadata.version("flashinfer-python")
except metadata.PackageNotFoundError:
    sys.exit("FlashInfer is not installed: pip install -e '.[gpu]'")
name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
print(f"{name} (sm_{major}{minor}), torch {torch.__version__}, CUDA {torch.version.cuda}, FlashInfer {flashinfer}")
PYTHON

pytest=("$PY" -m pytest -m gpu -q --durations 5 -p no:cacheprovider)
part kernels 160 "${pytest[@]}" tests/gpu/test_flashinfer_kernels.py
part encoder 40 "${pytest[@]}" tests/gpu/test_encoder.py
part system 80 "${pytest[@]}" tests/gpu --ignore tests/gpu/test_flashinfer_kernels.py --ignore tests/gpu/test_graphs.py \
  --ignore tests/gpu/test_encoder.py
part graphs 70 "${pytest[@]}" tests/gpu/test_graphs.py -k "not compiled"
part attention 35 "$PY" -m benchmarks gpu_attention --json
part decode 55 "$PY" -m benchmarks gpu_decode --json
part shipping 15 "$PY" -m benchmarks shipping --json --device cuda
part cold_vs_hit 25 "$PY" -m benchmarks cold_vs_hit --json --device cuda

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
echo "all parts are ok, in $SECONDS s"
