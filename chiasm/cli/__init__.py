"""The command line: `chiasm`. It knows the SDK and how to talk to a person; it never loads torch by itself."""

from __future__ import annotations

from chiasm.cli.app import main

__all__ = ["main"]
