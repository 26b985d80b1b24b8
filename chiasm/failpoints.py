"""Failpoints: named places of a process at which a fault happens that the process was started with. For rehearsals.

`--failpoints 'encoder.pass=exit; Decode/tokens=drop@5'` ends the process in its first pass and, should it live, takes
the fifth message of tokens from its caller. A fault is `POINT=ACTION[@N]`; it happens at the Nth time that the point is
reached, counted over all that the process does (1 by default), with `@N+` from then on.

| action | |
|---|---|
| `exit` | the process ends at once, as if it had been killed |
| `sleep(SECONDS)` | whoever is there stands still; on an event loop everything does, except at a point of the wire |
| `raise` | an exception that nobody foresaw |
| `drop` | at a point of the wire: the response is not sent, and the call ends as with a lost connection |

Points of the wire are `METHOD/MESSAGE` (`chiasm.rpc.faulty`); the others are named by whoever passes them (`POINTS`). A
process without failpoints has none of this in its way: it is given functions that do nothing, and no interceptor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, cast

Step: TypeAlias = Callable[[str], None]
"""Is told of a place that was reached, by name."""

POINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "encoder.pass": "units are in the model's thread, and not computed",
        "store.reserved": "an entry has room in the region, and no bytes there",
        "store.publishing": "an entry is in the region, and nobody can find it yet",
        "store.chunks-put": "an entry's values are in the shared store, and its manifest is not",
        "store.manifest-read": "a manifest was read from the shared store, and the values were not",
        "decoder.attach": "an entry was read, and is not in the pool",
        "decoder.step": "a step is in the device's thread, and not computed",
    }
)
"""Points beside those of the wire, and what is so when one is reached."""

EXIT_CODE: Final = 70
"""What a process ends with that ended at a failpoint."""

_FAULT = re.compile(
    r"(?P<point>[^=\s]+)=(?P<action>exit|raise|drop|sleep\((?P<seconds>\d+(\.\d+)?)\))(@(?P<at>[1-9]\d*)(?P<on>\+)?)?"
)

_log = logging.getLogger(__name__)


class Injected(Exception):
    """What a failpoint raises."""


class Dropped(Injected):
    """A response that is not to be sent."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a point.

    Attributes:
        seconds: of a sleep.
        at: the time that it happens, 1 for the first.
        on: whether at every later time too.
    """

    action: Literal["exit", "sleep", "raise", "drop"]
    seconds: float = 0.0
    at: int = 1
    on: bool = False


def parse(text: str) -> dict[str, Fault]:
    """Faults by point. Raises ValueError for what is not one, for a second fault of one point, and for `drop` where
    there is no response to drop."""
    faults: dict[str, Fault] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        found = _FAULT.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is not POINT=ACTION[@N], with exit, sleep(SECONDS), raise or drop")
        point, action = found["point"], found["action"].partition("(")[0]
        if point in faults:
            raise ValueError(f"{point} has two faults")
        if action == "drop" and "/" not in point:
            raise ValueError(f"{point} has no response that could be dropped")
        faults[point] = Fault(
            cast(Literal["exit", "sleep", "raise", "drop"], action),
            float(found["seconds"] or 0),
            int(found["at"] or 1),
            found["on"] is not None,
        )
    return faults


class Failpoints:
    """The faults of one process, and how often each of their points was reached. Used from any thread."""

    def __init__(self, faults: Mapping[str, Fault] = MappingProxyType({})) -> None:
        self.faults = dict(faults)
        self.hits: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self.faults)

    def within(self, where: str) -> Step:
        """A function to be told of the points of one place, by their names there. It does nothing if none has a fault.

        `within("store")("chunks put")` reaches `store.chunks-put`.
        """
        if not any(point.startswith(f"{where}.") for point in self.faults):
            return nowhere
        return lambda name: self.hit(f"{where}.{name.replace(' ', '-')}")

    def hit(self, point: str) -> None:
        """A point is reached. Raises Injected if its fault is to raise."""
        fault = self._due(point)
        if fault is not None and fault.action == "sleep":
            time.sleep(fault.seconds)
        elif fault is not None:
            self._do(point, fault)

    async def reached(self, point: str) -> None:
        """As `hit`, where only the caller is to stand still. Raises Dropped too."""
        fault = self._due(point)
        if fault is not None and fault.action == "sleep":
            await asyncio.sleep(fault.seconds)
        elif fault is not None:
            self._do(point, fault)

    def _due(self, point: str) -> Fault | None:
        fault = self.faults.get(point)
        if fault is None:
            return None
        with self._lock:
            self.hits[point] += 1
            hits = self.hits[point]
        if hits != fault.at and not (fault.on and hits > fault.at):
            return None
        _log.warning("failpoint", extra={"point": point, "action": fault.action, "hit": hits})
        return fault

    def _do(self, point: str, fault: Fault) -> None:
        if fault.action == "exit":
            os._exit(EXIT_CODE)
        raise Dropped(point) if fault.action == "drop" else Injected(point)


def nowhere(name: str) -> None:
    """No fault anywhere."""
