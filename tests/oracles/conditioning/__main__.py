"""`python -m tests.oracles.conditioning --seed N [--json]`: states after layers against transformers.

Exit 0 if everything agrees, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence

from tests.oracles.conditioning.compare import compare


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. With --json the last line printed is one object."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.conditioning", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of weights, sizes, pictures and where it is cut")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    report = asyncio.run(compare(options.seed))
    if options.json:
        print(json.dumps({"seed": options.seed, **report.as_json()}))
    else:
        for name, apart in report.worst.items():
            print(f"{name:28} {apart:.1e} of the largest number")
        for fault in report.faults:
            print(fault)
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
