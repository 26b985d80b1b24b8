"""Reading a checkpoint's JSON: every key is asked for by name, and all that is missing or refused is told at once.

It knows types and names of keys; what the values mean is the family's.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from chiasm.errors import CheckpointError

T = TypeVar("T")

MAX_INTEGER = 2**31 - 1
"""Nothing a checkpoint counts is more than this."""

_ABSENT = object()

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def shown(value: object) -> str:
    """A value out of a file, for people: cut where it is long or deep."""
    return _repr.repr(value)


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises CheckpointError if there is no such file or it holds anything else.

    Anything else is also what Python's reader will not take: integers of thousands of digits, endless nesting.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(path.parent.name, [f"{path.name} is missing"]) from None
    except OSError as error:
        raise CheckpointError(path.parent.name, [f"{path.name} cannot be read ({type(error).__name__})"]) from None
    except json.JSONDecodeError as error:
        raise CheckpointError(path.parent.name, [f"{path.name} is not JSON (line {error.lineno})"]) from None
    except (ValueError, RecursionError) as error:  # no UTF-8, or beyond what can be read
        raise CheckpointError(path.parent.name, [f"{path.name} is not JSON ({type(error).__name__})"]) from None
    if not isinstance(data, dict):
        raise CheckpointError(path.parent.name, [f"{path.name} holds no object"])
    return data


class Reader:
    """One JSON object and its sections. Problems gather in one list; `finish` raises them together.

    A getter that finds a problem returns a harmless value of its type, so that reading can go on to the next key.
    """

    def __init__(self, data: Mapping[str, object], *, prefix: str = "", problems: list[str] | None = None) -> None:
        self._data = data
        self._prefix = prefix
        self.problems: list[str] = [] if problems is None else problems

    def __contains__(self, key: str) -> bool:
        return self._data.get(key) is not None

    def section(self, key: str) -> Reader:
        value = self._get(key, dict, {})
        return Reader(value, prefix=f"{self._prefix}{key}.", problems=self.problems)

    def integer(self, key: str, *, at_least: int = 1, at_most: int = MAX_INTEGER) -> int:
        value = self._get(key, int, at_least)
        if value < at_least:
            self.problem(key, f"is {shown(value)}, must be at least {at_least}")
            return at_least
        if value > at_most:
            self.problem(key, f"is {shown(value)}, must be at most {at_most}")
            return at_least
        return value

    def number(self, key: str) -> float:
        """A finite number above 0, as every number is that a checkpoint's mathematics needs."""
        value: object = self._data.get(key, _ABSENT)
        if isinstance(value, int) and not isinstance(value, bool):
            try:
                value = float(value)
            except OverflowError:
                value = math.inf
        elif not isinstance(value, float):
            return self._get(key, float, 1.0)
        if not (math.isfinite(value) and value > 0):
            self.problem(key, f"is {shown(self._data[key])}, must be a finite number above 0")
            return 1.0
        return value

    def string(self, key: str) -> str:
        return self._get(key, str, "")

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._get(key, list, [])
        if not all(type(item) is int and abs(item) <= MAX_INTEGER for item in value):
            self.problem(key, f"must be a list of integers, none beyond {MAX_INTEGER}")
            return ()
        return tuple(value)

    def raw(self, key: str) -> object | None:
        """The value as it stands, None where absent. For keys whose absence has a meaning."""
        return self._data.get(key)

    def refuse_unless(self, key: str, *allowed: object, why: str) -> None:
        """Adds a problem if the key is present with any other value than the allowed ones. Absent is allowed."""
        value = self._data.get(key)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            self.problem(key, f"= {shown(value)} is not supported: {why}")

    def problem(self, key: str, text: str) -> None:
        self.problems.append(f"{self._prefix}{key} {text}")

    def finish(self, where: str) -> None:
        if self.problems:
            raise CheckpointError(where, self.problems)

    def _get(self, key: str, kind: type[T], otherwise: T) -> T:
        value = self._data.get(key, _ABSENT)
        if value is _ABSENT or value is None:
            self.problem(key, "is missing")
            return otherwise
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.problem(key, f"is {shown(value)}, must be of type {kind.__name__}")
            return otherwise
        return value
