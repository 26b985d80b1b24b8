"""A small program in the place of a fleet's controller: it says what a test has it say. Quick to start, and no Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

PLAN = {
    "address": "127.0.0.1:1",
    "auth": "disabled",
    "pools": [{"role": role, "flags": {"model": "digits"}} for role in ("encoder", "decoder")],
}

_BEGIN = """
import os, sys, time
def say(line): os.write(1, line.encode() + b"\\n")
def hear(path):
    with open(path, "a") as heard:
        for line in sys.stdin: print(line.strip(), file=heard, flush=True)
        print("end", file=heard, flush=True)
"""


def plan(folder: Path) -> Path:
    """The file of a plan."""
    path = folder / "plan"
    path.write_text(json.dumps(PLAN), encoding="utf-8")
    return path


def program(text: str, *arguments: str) -> Sequence[str]:
    """A command that runs `text`, with `arguments` and then the path of the plan in `sys.argv`. It has `say(LINE)`, and
    `hear(PATH)`, which notes what comes from the router in a file until that has closed."""
    return [sys.executable, "-I", "-S", "-c", _BEGIN + text, *arguments]
