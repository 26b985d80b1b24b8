"""What the tell-tale processes have in common: the flags that the services do not know, and a bug if one is asked for.

    python -m tests.telltale.decoder --pace 0.005 --plant attached-short [flags of the service]

A bug that is reached says so once, in the log.
"""

from __future__ import annotations

import argparse
import logging
import runpy
import sys

from tests.telltale.plants import PLANTS, Planted

REACHED = "plant reached"
"""The line of the log."""

_log = logging.getLogger(__name__)


class _Told(Planted):
    """A bug that stays as long as its process, and tells when it is reached."""

    _hits = 0

    @property
    def hits(self) -> int:
        return self._hits

    @hits.setter
    def hits(self, hits: int) -> None:
        if hits and not self._hits:
            _log.warning(REACHED)
        self._hits = hits


def taken() -> argparse.Namespace:
    """Takes what is ours from the command line, plants, and leaves the rest to the service."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--plant", choices=sorted(PLANTS))
    mine, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    if mine.plant is not None:
        PLANTS[mine.plant].plant(_Told())
    return mine


def run(module: str) -> None:
    """Runs a service as `python -m` does."""
    runpy.run_module(module, run_name="__main__", alter_sys=True)
