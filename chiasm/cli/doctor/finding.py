"""What one look at the machine came to. Knows no machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Status(StrEnum):
    """`warn`: works, with less. `fail`: something that was asked for will not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check came to.

    Attributes:
        found: what is there.
        expected, fix: what should be, and what mends it; empty where all is well.
    """

    group: str
    name: str
    status: Status
    found: str
    expected: str = ""
    fix: str = ""


Check: TypeAlias = Callable[[], Finding]


def judged(group: str, name: str, found: str, *, well: bool, expected: str, fix: str, bad: Status) -> Finding:
    """A finding that is well, or `bad` with what should be."""
    return Finding(group, name, Status.OK, found) if well else Finding(group, name, bad, found, expected, fix)
