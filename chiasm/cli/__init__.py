"""The command line: `chiasm`. It knows the SDK and how to talk to a person; it never loads torch by itself."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The entry point of the command `chiasm`. Ends the process: see `chiasm.cli.app.main`."""
    try:
        from chiasm.cli.app import main as run  # here, where an interruption of the loading is no traceback

        run()
    except KeyboardInterrupt:
        sys.exit(130)
