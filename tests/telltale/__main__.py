"""`python -m tests.telltale [NAME …]`: every bug in turn, or those that are named, each in a system of its own, and
first the same systems without a bug. A line for each; ends with 1 if a bug was missed, or something found where nothing
is wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence

import uvloop

from chiasm.media.sandbox import Sandbox
from tests.telltale.oracle import Oracle
from tests.telltale.plants import PLANTS, Plant
from tests.telltale.trial import told, trial

MOST = 240
"""Requests in which a bug must be found."""

CONTROLS = (
    Plant("control", "", "nothing", lambda bug: None),
    Plant("control-tight", "", "nothing, in small pools", lambda bug: None, settings={"text_tokens": 320}),
    Plant("control-bytes", "", "nothing, and bytes of entries are changed", lambda bug: None, hurt="bytes"),
    Plant(
        "control-decoders", "", "nothing, and decoders are lost", lambda bug: None, hurt="decoders",
        settings={"pace": 0.02},
    ),
    Plant("control-last-words", "", "nothing, and decoders are lost at the end", lambda bug: None, hurt="last words"),
    Plant("control-responses", "", "nothing, and responses are lost", lambda bug: None, hurt="responses"),
    Plant(
        "control-routers", "", "nothing, and routers are lost", lambda bug: None, hurt="routers",
        settings={"pace": 0.02},
    ),
)  # fmt: skip
"""What every bug is compared with: nothing may be found."""


async def _all(plants: Sequence[Plant], seed: int, most: int) -> bool:
    """Whether all is as it must be."""
    oracle, right = Oracle(), True
    async with Sandbox(workers=1) as sandbox:
        for plant in plants:
            outcome = await trial(plant, sandbox, oracle, seed=seed, most=most)
            fine = not outcome.found if plant in CONTROLS else bool(outcome.found and outcome.hits)
            right &= fine
            sys.stdout.write(f"{'' if fine else 'WRONG '}{told(plant, outcome)}  ({plant.role}: {plant.says})\n")
            sys.stdout.flush()
            for finding in outcome.found[:3] if not fine else ():
                sys.stdout.write(f"      {finding}\n")
    return right


def _chosen(names: Sequence[str]) -> Iterator[Plant]:
    yield from CONTROLS
    yield from (PLANTS[name] for name in names or PLANTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--most", type=int, default=MOST, help="requests in which a bug must be found")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # services that have a bug say so at length
    plants = [*_chosen(given.names)]
    sys.exit(not uvloop.run(_all(plants, given.seed, given.most)))


if __name__ == "__main__":
    main()
