"""The command: train the checkpoint, or measure one.

`python -m tools.train_digits` trains with the defaults that made the shipped checkpoint, and replaces it; `--evaluate`
prints the accuracies on held-out digits as JSON; `--held-out` writes the held-out clips, images and the sheet again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from chiasm.models.registry import SHIPPED
from tools.train_digits import held_out
from tools.train_digits.data import split
from tools.train_digits.evaluate import evaluate
from tools.train_digits.train import SHIPPED_PLANS, train


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.train_digits", description="The digits checkpoint.")
    parser.add_argument("--output", type=Path, default=SHIPPED / "digits", help="folder of the checkpoint")
    parser.add_argument("--run", type=int, choices=(1, 2, 3), help="only this one of the three runs")
    parser.add_argument("--start", type=Path, help="with --run 2 or 3: the folder of the weights it begins with")
    parser.add_argument("--checkpoints", type=Path, help="folder for the state after every 500 steps")
    parser.add_argument("--threads", type=int, default=2)
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--evaluate", action="store_true", help="measure the checkpoint instead of training it")
    does.add_argument("--held-out", action="store_true", help="only write the held_out folder")
    parser.add_argument("--clips", type=int, default=304, help="clips per task of an evaluation")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="arithmetic to measure")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    _, others = split()
    if given.evaluate:
        dtype = getattr(torch, given.dtype)
        print(json.dumps(evaluate(given.output, digits=others, clips=given.clips, dtype=dtype), indent=2))
        return
    if not given.held_out:
        start = given.start
        for number, plan in enumerate(SHIPPED_PLANS, 1):
            if given.run in (None, number):
                train(plan, given.output, start=start, checkpoints=given.checkpoints)
                start = given.output
    held_out.write(given.output / "held_out", others)


if __name__ == "__main__":
    main()
