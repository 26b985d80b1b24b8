"""Reading a checkpoint's JSON: every key is asked for by name, and all that is missing or refused is told at once.

It knows types and names of keys; what the values mean is the family's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from chiasm.errors import CheckpointError

T = TypeVar("T")

_ABSENT = object()


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises CheckpointError if there is no such file or it holds anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(path.parent.name, [f"{path.name} is missing"]) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(path.parent.name, [f"{path.name} is not JSON ({error})"]) from None
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

    def integer(self, key: str, *, at_least: int = 1) -> int:
        value = self._get(key, int, at_least)
        if value < at_least:
            self.problem(key, f"is {value}, must be at least {at_least}")
            return at_least
        return value

    def number(self, key: str) -> float:
        value: object = self._data.get(key, _ABSENT)
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        return self._get(key, float, 1.0)

    def string(self, key: str) -> str:
        return self._get(key, str, "")

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._get(key, list, [])
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            self.problem(key, "must be a list of integers")
            return ()
        return tuple(value)

    def raw(self, key: str) -> object | None:
        """The value as it stands, None where absent. For keys whose absence has a meaning."""
        return self._data.get(key)

    def refuse_unless(self, key: str, *allowed: object, why: str) -> None:
        """Adds a problem if the key is present with any other value than the allowed ones. Absent is allowed."""
        value = self._data.get(key)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            self.problem(key, f"= {value!r} is not supported: {why}")

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
            self.problem(key, f"is {value!r}, must be of type {kind.__name__}")
            return otherwise
        return value
