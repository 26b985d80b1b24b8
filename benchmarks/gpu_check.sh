#!/usr/bin/env bash
# Everything that can only be known on a GPU, in one run of less than eight minutes: the kernels against sums written
# out, the system on the device against the CPU, three processes on the device against one on the CPU, streamed blocks
# against resident ones, decode steps in graphs against eager ones, then figures. Every part runs, whatever the one
# before it said, and ends with a line of JSON; the last one tells which failed, and the exit status is not zero if any
# did. It has never run on a GPU.
# What torch.compile makes takes longer: python -m pytest -m gpu tests/gpu/test_graphs.py -k compiled
#
# It wants a CUDA build of torch, the extras `gpu` and `dev`, and a compiler (nvcc, ninja): FlashInfer builds its
# kernels when they are first used. PY names the interpreter.
#
# DEVICE=cpu goes through the same parts where there is no GPU, to see that they can be run: tests that need a device
# are skipped, and the figures of kernels are left out.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-python}
DEVICE=${DEVICE:-cuda}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
WHOLE=470
failed=()

# part NAME SECONDS COMMAND...
part() {
  local name=$1 limit=$2 began=$SECONDS status left=$((WHOLE - SECONDS))
  shift 2
  [ "$limit" -le "$left" ] || limit=$((left > 1 ? left : 1))
  echo "== $name"
  timeout --kill-after=5 "$limit" "$@"
  status=$?
  echo "{\"part\": \"$name\", \"status\": $status, \"seconds\": $((SECONDS - began)), \"limit\": $limit}"
  [ $status -eq 0 ] || failed+=("\"$name\"")
}

if [ "$DEVICE" = cuda ]; then
  timeout 60 "$PY" - <<'PYTHON' || exit 1
import importlib.metadata as metadata
import json
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("there is no CUDA device")
try:
    flashinfer = metadata.version("flashinfer-python")
except metadata.PackageNotFoundError:
    sys.exit("FlashInfer is not installed: pip install -e '.[gpu]'")
major, minor = torch.cuda.get_device_capability()
versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "flashinfer": flashinfer}
print(json.dumps({"device": torch.cuda.get_device_name(), "sm": f"{major}{minor}", **versions}))
PYTHON
fi

pytest=("$PY" -m pytest -m gpu -q --durations 5 -p no:cacheprovider)
part kernels 150 "${pytest[@]}" tests/gpu/test_flashinfer_kernels.py
part encoder 35 "${pytest[@]}" tests/gpu/test_encoder.py
part system 60 "${pytest[@]}" tests/gpu --ignore tests/gpu/test_flashinfer_kernels.py --ignore tests/gpu/test_graphs.py \
  --ignore tests/gpu/test_encoder.py --ignore tests/gpu/test_processes.py --ignore tests/gpu/test_streaming.py
part processes 60 "$PY" -m benchmarks device_ids --json --device "$DEVICE"
part streaming 40 "${pytest[@]}" tests/gpu/test_streaming.py
part graphs 60 "${pytest[@]}" tests/gpu/test_graphs.py -k "not compiled"
if [ "$DEVICE" = cuda ]; then
  part attention 30 "$PY" -m benchmarks gpu_attention --json
  part decode 45 "$PY" -m benchmarks gpu_decode --json
fi
part shipping 20 "$PY" -m benchmarks shipping --json --device "$DEVICE"
part cold_vs_hit 25 "$PY" -m benchmarks cold_vs_hit --json --device "$DEVICE"

echo "{\"failed\": [$(IFS=,; echo "${failed[*]-}")], \"seconds\": $SECONDS}"
[ ${#failed[@]} -eq 0 ]
