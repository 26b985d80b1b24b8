#!/usr/bin/env bash
# Everything that can only be known on a GPU, in one run of a few minutes: agreement with the CPU, then figures.
# Run it in an environment with a CUDA build of torch and the `dev` extra. It prints one JSON line per figure.
set -euo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-python}
"$PY" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())'
"$PY" -m pytest -m gpu -q -p no:cacheprovider tests
"$PY" -m benchmarks cold_vs_hit --json --device cuda
