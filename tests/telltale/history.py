"""The history of a run: every operation of every client, as JSON lines, so that it can be judged again later.

Three kinds of lines: what the run was (`run`), what was done to it (`fault`), and what a client saw (`request`). All
times are seconds since the run began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from chiasm import Finished, Started, Token
from chiasm.client import Event
from chiasm.client.events import FramesVisible
from chiasm.errors import ChiasmError
from tests.telltale.asking import Medium, Picture, Request

ENDS = ("whole", "error", "left", "hung", "strange")
"""How a client's operation ended: the stream did, with an error, by the client's own will, not in time, or with what no
server may answer."""


@dataclass
class Record:
    """One operation.

    Attributes:
        events: what came, in order, each with its kind and its time.
        end: one of `ENDS`; None while it runs.
        reason, code: of an error.
    """

    request: Request
    begun: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    end: str | None = None
    reason: str | None = None
    code: str | None = None
    ended: float = 0.0

    def note(self, event: Event, at: float) -> None:
        self.events.append({"at": round(at, 4), **_told(event)})

    def fail(self, error: Exception) -> None:
        self.end = "error" if isinstance(error, ChiasmError) else "strange"
        self.reason = error.reason if isinstance(error, ChiasmError) else repr(error)
        self.code = type(error).__name__


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, and from when to when it could be felt."""

    name: str
    begun: float
    ended: float


@dataclass
class History:
    """A run.

    Attributes:
        roots: of the tenants, by name.
        told: what the run was, for people.
    """

    roots: dict[str, bytes]
    told: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


class Writer:
    """Writes a history while it happens, a line at a time."""

    def __init__(self, file: TextIO, roots: Mapping[str, bytes], told: Mapping[str, Any]) -> None:
        self._file = file
        self._put("run", {"roots": {name: root.hex() for name, root in roots.items()}, "told": dict(told)})

    def record(self, record: Record) -> None:
        self._put("request", asdict(record))

    def fault(self, fault: Fault) -> None:
        self._put("fault", asdict(fault))

    def _put(self, kind: str, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **line}) + "\n")


def read(path: Path) -> History:
    """A history that was written. Raises ValueError for a file that is none."""
    lines = _lines(path)
    first = next(lines, {})
    if first.get("kind") != "run":
        raise ValueError(f"{path} is no history")
    history = History({name: bytes.fromhex(root) for name, root in first["roots"].items()}, first["told"])
    for line in lines:
        kind = line.pop("kind")
        if kind == "fault":
            history.faults.append(Fault(**line))
        else:
            history.records.append(Record(**{**line, "request": _request(line["request"])}))
    return history


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _request(line: dict[str, Any]) -> Request:
    media = tuple(
        Medium(one["kind"], tuple(Picture(**picture) for picture in one["pictures"]), one["clip"])
        for one in line["media"]
    )
    return Request(**{**line, "media": media, "parts": tuple(line["parts"]), "stop": tuple(line["stop"])})


def _told(event: Event) -> dict[str, Any]:
    """An event as it is written down: lists instead of tuples, so that what is read again is the same."""
    attempt = getattr(event, "attempt", None)
    told: dict[str, Any] = {} if attempt is None else {"attempt": attempt}
    if isinstance(event, Token):
        told |= {"kind": "tokens", "index": event.index, "ids": [*event.ids], "text": event.text}
        return told | {"visible": event.visible}
    if isinstance(event, FramesVisible):
        told |= {"kind": "visible", "index": event.index, "first": event.first, "count": event.count}
        return told | {"until": event.until}
    if isinstance(event, Started):
        frames = [
            {"slot": one.slot, "index": one.index, "offset": one.offset, "grid": [*one.grid], "tokens": one.tokens,
             "at_index": one.at_index}
            for one in event.frames
        ]  # fmt: skip
        return told | {"kind": "started", "frames": frames, "prompt_tokens": event.prompt_tokens}
    assert isinstance(event, Finished), event
    usage = json.loads(json.dumps(asdict(event.usage)))
    return told | {"kind": "finished", "reason": event.reason, "stop": event.stop, "usage": usage}
