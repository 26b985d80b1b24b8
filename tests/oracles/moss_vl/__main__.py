"""`python -m tests.oracles.moss_vl --checkpoint DIR --oracle DIR [--json]`: exit 0 if everything agrees, else 1."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from chiasm.errors import ChiasmError
from tests.oracles.moss_vl import CHECKPOINT, DATA
from tests.oracles.moss_vl.compare import compare


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. With --json the last line printed is one object."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.moss_vl", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder in Hugging Face layout")
    parser.add_argument("--oracle", type=Path, default=DATA, help="folder with inputs, expected tensors and tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        report = compare(options.checkpoint, options.checkpoint, options.oracle)
    except (ChiasmError, OSError, SafetensorError, json.JSONDecodeError) as error:
        reason = f"{type(error).__name__}: {error}"
        print(json.dumps({"ok": False, "worst": {}, "faults": [reason]}) if options.json else reason)
        return 1
    print(json.dumps(report.as_json()) if options.json else report.as_table())
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
