"""Judges a history: what must be true of each operation, found from its request alone.

`python -m tests.telltale.validator FILE …` judges histories that were kept, and ends with 1 if anything is wrong. It
knows no service and no fault but by name.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import blake3

from tests.telltale.history import ENDS, Fault, History, Record, read
from tests.telltale.oracle import Oracle, Truth

FELT: Final = 8.0
"""Seconds for which a fault may still be felt when it is over: processes that were killed come back meanwhile."""

MAY_END: Final[Mapping[str, frozenset[str]]] = {
    # Twice over one unit, which takes many changes at a time: no digest is believed, and no client is given a doubt.
    "region bytes": frozenset({"ENTRY_MISSING"}),
}
"""Reasons with which a fault may end an admitted request, by what its name begins with. Any other fault ends none: what
a process was at is gone on with by another."""

LOSES: Final = ("decoder", "router")
"""What names of faults begin with after which an answer may be gone on with by somebody who finds all of its prompt."""


class Finding(NamedTuple):
    """Something that must not be.

    Attributes:
        request: its name.
        what: one word of what is wrong.
        said: in words, with both values.
    """

    request: str
    what: str
    said: str


def judge(history: History, oracle: Oracle) -> list[Finding]:
    """Everything that is wrong in a history."""
    names = Counter(record.request.name for record in history.records)
    found = [Finding(name, "twice", f"{count} operations of that name") for name, count in names.items() if count > 1]
    truths = [oracle.truth(record.request, history.roots[record.request.tenant]) for record in history.records]
    for record, truth in zip(history.records, truths, strict=True):
        found += judge_one(record, truth, *felt(record, history.faults))
    if history.told.get("quiet"):
        found += _unknown(history.records, truths)
    return found


def _unknown(records: Sequence[Record], truths: Sequence[Truth]) -> Iterator[Finding]:
    """What was known of a request and could not be: its tenant had not asked it. Who finds out what others asked, by
    what is quick, finds it here.

    Only of runs in which nothing is done twice: an answer that gave way finds what it has computed itself.
    """
    first: dict[tuple[str, bytes], int] = {}  # by tenant and a digest of all rows up to one: who asked that first,
    rows: dict[tuple[str, bytes], float] = {}  # and when it was asked again
    units: Counter[tuple[str, bytes]] = Counter()  # by tenant and unit, in how many media it is
    chains = [_chain(truth.rows) for truth in truths]
    order = sorted(range(len(records)), key=lambda place: records[place].begun)
    for place in order:
        tenant = records[place].request.tenant
        for digest in chains[place]:
            if (tenant, digest) not in first:
                first[tenant, digest] = place
            elif (tenant, digest) not in rows:
                rows[tenant, digest] = records[place].begun
        units.update((tenant, digest) for medium in truths[place].units for digest in {*medium})
    for place, (record, truth) in enumerate(zip(records, truths, strict=True)):
        tenant = record.request.tenant
        for event in _of(record, "finished"):
            # One that another had before it, or while it ran.
            could = sum(
                first[tenant, one] != place or rows.get((tenant, one), record.ended) < record.ended
                for one in chains[place]
            )
            told = event["usage"]["cached_prompt_tokens"] or 0
            if told > could:
                yield Finding(record.request.name, "foreign", f"{told} tokens were known, and {could} could be")
            for medium, digests in zip(event["usage"]["media"], truth.units, strict=False):
                seen = Counter(digests)
                most = sum(n if units[tenant, d] > 1 else n - 1 for d, n in seen.items())
                if (medium["units_cached"] or 0) > most:
                    yield Finding(
                        record.request.name,
                        "foreign",
                        f"{medium['units_cached']} units were known, and {most} could be",
                    )


def _chain(rows: Sequence[bytes]) -> list[bytes]:
    """A digest of all rows up to each."""
    digest = blake3.blake3()
    chain = []
    for row in rows:
        digest.update(row)
        chain.append(digest.digest())
    return chain


def felt(record: Record, faults: Sequence[Fault]) -> tuple[frozenset[str], bool]:
    """What the faults of its time may have done to an operation: reasons with which it may have ended, and whether
    another may have gone on with it."""
    reasons: set[str] = set()
    resumed = False
    for fault in faults:
        if fault.begun <= record.ended and record.begun <= fault.ended + FELT:
            resumed |= fault.name.startswith(LOSES)
            for name, may in MAY_END.items():
                if fault.name.startswith(name):
                    reasons |= may
    return frozenset(reasons), resumed


def judge_one(record: Record, truth: Truth, may: frozenset[str] = frozenset(), resumed: bool = False) -> list[Finding]:
    """Everything that is wrong with one operation.

    Args:
        may: reasons with which it may have ended though it was admitted.
        resumed: its answer may have been gone on with. That is seen nowhere but in what was known of its prompt: the
            last of those who worked on it says that, and computed a token of the answer last.
    """
    return [Finding(record.request.name, what, said) for what, said in _wrong(record, truth, may, resumed)]


def _wrong(record: Record, truth: Truth, may: frozenset[str], resumed: bool) -> Iterator[tuple[str, str]]:
    yield from _ending(record, truth, may)
    if truth.refusal is not None:
        if record.events:
            yield "refusal", f"{len(record.events)} events of a request that is refused"
        return
    yield from _order(record)
    yield from _tokens(record, truth)
    yield from _timeline(record, truth)
    for event in _of(record, "finished"):
        yield from _finished(event, truth, resumed)


def _ending(record: Record, truth: Truth, may: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Exactly one end, and one that may be."""
    finished = len(_of(record, "finished"))
    ends = finished + (record.end in ("error", "hung", "strange"))
    if record.end not in ENDS:
        yield "end", "it has none"
    elif record.end == "left":
        if record.request.leave is None or finished > 1:
            yield "end", f"it was left, {finished} ends"
    elif ends != 1:
        yield "end", f"{finished} ends, and {record.end}"
    if record.end in ("hung", "strange"):
        yield "status", f"{record.end}: {record.reason}"
    elif truth.refusal is not None:
        if record.end != "left" and not (record.end == "error" and record.reason in {truth.refusal, *may}):
            yield "refusal", f"{record.end} {record.reason} instead of {truth.refusal}"
    elif record.end == "error" and record.reason not in may:
        yield "status", f"{record.code} {record.reason} of an admitted request"


def _order(record: Record) -> Iterator[tuple[str, str]]:
    """Started, visible, tokens, finished; attempts never go back."""
    kinds = [event["kind"] for event in record.events]
    if kinds.count("started") > 1 or ("started" in kinds and kinds[0] != "started"):
        yield "order", f"started at {[place for place, kind in enumerate(kinds) if kind == 'started']}"
    if "tokens" in kinds and kinds[:2] != ["started", "visible"]:
        yield "order", f"began with {kinds[:3]}"
    if "finished" in kinds and kinds.index("finished") != len(kinds) - 1:
        yield "order", f"{kinds[kinds.index('finished') + 1 :]} behind the end"
    attempts = [event["attempt"] for event in record.events if "attempt" in event]
    if attempts != sorted(attempts):
        yield "attempt", f"{attempts}"


def _tokens(record: Record, truth: Truth) -> Iterator[tuple[str, str]]:
    """Each index once and in order, each token the right one, the text theirs."""
    ids: list[int] = []
    text = ""
    for event in _of(record, "tokens"):
        if event["index"] != len(ids):
            yield "index", f"{event['index']} where {len(ids)} was next"
        ids += event["ids"]
        text += event["text"]
        told = truth.certain[: len(ids)]
        if event["ids"] and told and len(text) > told[-1]:
            yield "early", f"{text!r}, of which {told[-1]} characters are certain"
        if event["visible"] != len(truth.frames):
            yield "visible", f"a token sees {event['visible']} of {len(truth.frames)} frames"
    whole = record.end == "whole"
    if tuple(ids) != (truth.ids if whole else truth.ids[: len(ids)]):
        yield "token", f"{ids} instead of {[*truth.ids]}"
    if text != truth.text if whole else not truth.text.startswith(text):
        yield "text", f"{text!r} instead of {truth.text!r}"


def _timeline(record: Record, truth: Truth) -> Iterator[tuple[str, str]]:
    """What is on the timeline, and from when on it is seen: told once, whoever has gone on with the answer."""
    for event in _of(record, "started"):
        frames = [{**asdict(frame), "grid": [*frame.grid]} for frame in truth.frames]
        if event["frames"] != frames:
            yield "frames", f"{event['frames']} instead of {frames}"
        if event["prompt_tokens"] != truth.prompt_tokens:
            yield "usage", f"a prompt of {event['prompt_tokens']} tokens instead of {truth.prompt_tokens}"
    seen = [(event["index"], event["first"], event["count"], event["until"]) for event in _of(record, "visible")]
    if seen and seen != [(0, 0, len(truth.frames), truth.until)]:
        yield "visible", f"{seen} instead of all {len(truth.frames)} frames, until {truth.until}, from the first token"


def _finished(event: Mapping[str, Any], truth: Truth, resumed: bool) -> Iterator[tuple[str, str]]:
    """Why it ended, and what it used."""
    if (event["reason"], event["stop"]) != (truth.reason, truth.stop):
        yield "reason", f"{event['reason']} {event['stop']!r} instead of {truth.reason} {truth.stop!r}"
    usage = event["usage"]
    counts = {name: usage[name] for name in ("prompt_tokens", "visual_tokens", "output_tokens")}
    right = {
        "prompt_tokens": truth.prompt_tokens,
        "visual_tokens": truth.visual_tokens,
        "output_tokens": len(truth.ids),
    }
    if counts != right:
        yield "usage", f"{counts} instead of {right}"
    if not 0 <= (usage["cached_prompt_tokens"] or 0) < truth.prompt_tokens + resumed:
        yield "usage", f"{usage['cached_prompt_tokens']} of {truth.prompt_tokens} tokens were known"
    expected = [json.loads(json.dumps(asdict(medium))) for medium in truth.media]
    told = [{name: medium[name] for name in one} for medium, one in zip(usage["media"], expected, strict=False)]
    if told != expected or len(usage["media"]) != len(expected):
        yield "media", f"{usage['media']} instead of {expected}"
    for medium in usage["media"]:
        if not 0 <= (medium["units_cached"] or 0) <= medium["units"]:
            yield "media", f"{medium['units_cached']} of {medium['units']} units were known"


def _of(record: Record, kind: str) -> list[dict[str, Any]]:
    return [event for event in record.events if event["kind"] == kind]


def summary(history: History, found: Sequence[Finding]) -> dict[str, Any]:
    """One line about a history."""
    return {
        "requests": len(history.records),
        "ends": Counter(record.end for record in history.records),
        "reasons": Counter(record.reason for record in history.records if record.reason),
        "tokens": sum(len(event["ids"]) for record in history.records for event in _of(record, "tokens")),
        "faults": Counter(fault.name for fault in history.faults),
        "wrong": Counter(finding.what for finding in found),
    }


def main(paths: Sequence[str]) -> int:
    """Prints a line for each file and for what is wrong in it."""
    oracle = Oracle()
    bad = False
    for path in paths:
        history = read(Path(path))
        found = judge(history, oracle)
        sys.stdout.write(json.dumps({"file": path, **summary(history, found)}) + "\n")
        for finding in found[:20]:
            sys.stdout.write(json.dumps(finding._asdict()) + "\n")
        bad |= bool(found)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
