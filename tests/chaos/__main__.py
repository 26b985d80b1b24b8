"""`python -m tests.chaos --minutes N --seed S`: every scenario in turn, one line of JSON for each.

Ends with 1 if an answer was wrong. `--control` runs the decoder that verifies nothing, and ends with 1 unless something
was found to be wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from tests.chaos.system import CONCURRENCY, CONTROL, SCENARIOS, chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all scenarios together")
    parser.add_argument("--seed", type=int, default=0, help="of questions and faults, not of their timing")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="questions at a time")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append", help="only this one")
    parser.add_argument("--control", action="store_true", help="a decoder that verifies nothing must be found out")
    given = parser.parse_args()
    names = given.scenario or list(SCENARIOS)
    scenarios = {"control": CONTROL} if given.control else {name: SCENARIOS[name] for name in names}
    bad = False
    for name, scenario in scenarios.items():
        seconds = given.minutes * 60 / len(scenarios)
        report = asyncio.run(chaos(scenario, seconds=seconds, seed=given.seed, concurrency=given.concurrency))
        sys.stdout.write(json.dumps({"scenario": name, **report.told}) + "\n")
        sys.stdout.flush()
        bad |= bool(report.verdict.wrong) != given.control
    sys.exit(bad)


if __name__ == "__main__":
    main()
