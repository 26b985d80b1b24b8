"""The command: train the checkpoint, or measure one.

    python -m tools.train_digits [--output DIR]           trains with the defaults that made the shipped one
    python -m tools.train_digits --evaluate [--output DIR]  prints accuracies on held-out digits as JSON
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from chiasm.models.registry import SHIPPED
from tools.train_digits.train import Plan, train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.train_digits", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=SHIPPED / "digits", help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--checkpoints", type=Path, help="folder for the state after every 500 steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true", help="measure the checkpoint instead of training it")
    parser.add_argument("--clips", type=int, default=300, help="clips per task of an evaluation")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="arithmetic to measure")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.evaluate:
        from tools.train_digits.evaluate import evaluate

        print(json.dumps(evaluate(given.output, clips=given.clips, dtype=getattr(torch, given.dtype)), indent=2))
    else:
        train(Plan(steps=given.steps), given.output, checkpoints=given.checkpoints)


if __name__ == "__main__":
    main()
