"""Histories of a quiet run that were altered: what a client would have seen of each bug, without the bug. Every one
must be found wrong.

An alteration changes a copy of a record that was right. It gives False where that record has nothing to be changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.telltale.history import Record

Alteration = Callable[[Record], bool]

ALTERATIONS: dict[str, tuple[str, Alteration]] = {}
"""What each is, in a few words, and how it is made, by name."""


def _alteration(says: str) -> Callable[[Alteration], Alteration]:
    def add(alter: Alteration) -> Alteration:
        ALTERATIONS[alter.__name__.strip("_").replace("_", "-")] = says, alter
        return alter

    return add


def _tokens(record: Record) -> list[dict[str, Any]]:
    """Events with an id each."""
    return [event for event in record.events if event["kind"] == "tokens" and event["ids"]]


def _one(record: Record, kind: str) -> dict[str, Any]:
    return next(event for event in record.events if event["kind"] == kind)


def _number_anew(record: Record) -> None:
    for index, event in enumerate(_tokens(record)):
        event["index"] = index


@_alteration("a token is missing")
def _token_dropped(record: Record) -> bool:
    tokens = _tokens(record)
    if len(tokens) > 2:
        record.events.remove(tokens[1])
    return len(tokens) > 2


@_alteration("a token is missing, and the others have closed up")
def _token_dropped_and_numbered(record: Record) -> bool:
    changed = _token_dropped(record)
    _number_anew(record)
    return changed


@_alteration("the last token is missing")
def _last_token_dropped(record: Record) -> bool:
    record.events.remove(_tokens(record)[-1])
    return True


@_alteration("a token came twice")
def _token_repeated(record: Record) -> bool:
    place = record.events.index(_tokens(record)[0])
    record.events.insert(place, dict(record.events[place]))
    return True


@_alteration("a token came twice, under two indices")
def _token_repeated_and_numbered(record: Record) -> bool:
    changed = _token_repeated(record)
    _number_anew(record)
    return changed


@_alteration("two tokens have changed places, with their indices")
def _events_swapped(record: Record) -> bool:
    tokens = _tokens(record)
    if len(tokens) < 2:
        return False
    one, other = record.events.index(tokens[0]), record.events.index(tokens[1])
    record.events[one], record.events[other] = record.events[other], record.events[one]
    return True


@_alteration("two ids have changed places")
def _ids_swapped(record: Record) -> bool:
    tokens = _tokens(record)
    if len(tokens) < 2 or tokens[0]["ids"] == tokens[1]["ids"]:
        return False
    tokens[0]["ids"], tokens[1]["ids"] = tokens[1]["ids"], tokens[0]["ids"]
    return True


@_alteration("an id is another one")
def _foreign_token(record: Record) -> bool:
    _tokens(record)[-1]["ids"] = [_tokens(record)[-1]["ids"][0] ^ 1]
    return True


@_alteration("a token more came behind the last")
def _token_behind_the_last(record: Record) -> bool:
    last = _tokens(record)[-1]
    record.events.insert(record.events.index(last) + 1, {**last, "index": last["index"] + 1, "text": ""})
    return True


@_alteration("an attempt is followed by an earlier one")
def _attempts_go_back(record: Record) -> bool:
    for event, attempt in zip(record.events, [2, *[1] * len(record.events)], strict=False):
        event["attempt"] = attempt
    return True


@_alteration("an answer ended twice")
def _two_ends(record: Record) -> bool:
    record.events.append(dict(_one(record, "finished")))
    return True


@_alteration("an answer ended, and then failed")
def _end_and_error(record: Record) -> bool:
    record.end, record.reason, record.code = "error", "DECODER_LOST", "Unavailable"
    return True


@_alteration("a stream ended without an end")
def _no_end(record: Record) -> bool:
    record.events.remove(_one(record, "finished"))
    return True


@_alteration("an operation was never over")
def _never_over(record: Record) -> bool:
    record.end = None
    return True


@_alteration("a client waited in vain")
def _hung(record: Record) -> bool:
    record.events.remove(_one(record, "finished"))
    record.end = "hung"
    return True


@_alteration("a client met what no server may say")
def _strange(record: Record) -> bool:
    record.events.clear()
    record.end, record.reason = "strange", "KeyError('x')"
    return True


@_alteration("a request was refused that is right")
def _refused(record: Record) -> bool:
    record.events.clear()
    record.end, record.reason, record.code = "error", "MEDIA_DECODE_FAILED", "InvalidRequest"
    return True


@_alteration("a request failed though nothing was wrong")
def _failed(record: Record) -> bool:
    record.events.clear()
    record.end, record.reason, record.code = "error", "ENTRY_MISSING", "ServerError"
    return True


@_alteration("an answer was left by a client that stays")
def _left(record: Record) -> bool:
    record.events.remove(_one(record, "finished"))
    record.end = "left"
    return record.request.leave is None


@_alteration("tokens came behind the end")
def _token_behind_the_end(record: Record) -> bool:
    record.events.append(record.events.pop(record.events.index(_tokens(record)[-1])))
    return True


@_alteration("tokens came before the start")
def _token_before_the_start(record: Record) -> bool:
    record.events.insert(0, record.events.pop(record.events.index(_tokens(record)[0])))
    return True


@_alteration("the answer began twice")
def _two_starts(record: Record) -> bool:
    record.events.insert(1, dict(_one(record, "started")))
    return True


@_alteration("an answer ended a token early, and says so")
def _early_end(record: Record) -> bool:
    if len(_tokens(record)) < 2:
        return False
    record.events.remove(_tokens(record)[-1])
    _one(record, "finished")["usage"]["output_tokens"] -= 1
    _one(record, "finished")["reason"] = "length"
    return True


@_alteration("a character of the text is another one")
def _text_off_by_one(record: Record) -> bool:
    for event in _tokens(record):
        if event["text"]:
            event["text"] = chr(ord(event["text"][0]) ^ 1) + event["text"][1:]
            return True
    return False


@_alteration("a character of the text is missing")
def _text_too_short(record: Record) -> bool:
    for event in _tokens(record):
        if event["text"]:
            event["text"] = event["text"][1:]
            return True
    return False


@_alteration("text came before it was certain")
def _text_too_early(record: Record) -> bool:
    first, *others = _tokens(record)
    later = "".join(event["text"] for event in others)
    first["text"] += later
    for event in others:
        event["text"] = ""
    return bool(later)


@_alteration("the answer ended for another reason")
def _other_reason(record: Record) -> bool:
    finished = _one(record, "finished")
    finished["reason"] = "stop" if finished["reason"] == "length" else "length"
    return True


@_alteration("another stop string is named")
def _other_stop(record: Record) -> bool:
    _one(record, "finished")["stop"] = "another"
    return True


@_alteration("the answer is told to be a token longer")
def _output_miscounted(record: Record) -> bool:
    _one(record, "finished")["usage"]["output_tokens"] += 1
    return True


@_alteration("the prompt is told to be longer where it ends")
def _prompt_miscounted(record: Record) -> bool:
    _one(record, "finished")["usage"]["prompt_tokens"] += 1
    return True


@_alteration("the prompt is told to be longer where it begins")
def _prompt_miscounted_at_start(record: Record) -> bool:
    _one(record, "started")["prompt_tokens"] += 1
    return True


@_alteration("visual tokens are miscounted")
def _visual_miscounted(record: Record) -> bool:
    _one(record, "finished")["usage"]["visual_tokens"] += 1
    return True


@_alteration("a medium is missing in the usage")
def _medium_unused(record: Record) -> bool:
    media = _one(record, "finished")["usage"]["media"]
    return bool(media) and bool(media.pop())


@_alteration("more units were known than there are")
def _too_many_known(record: Record) -> bool:
    media = _one(record, "finished")["usage"]["media"]
    for medium in media[:1]:
        medium["units_cached"] = medium["units"] + 1
    return bool(media)


@_alteration("more of the prompt was known than there is")
def _all_of_the_prompt_known(record: Record) -> bool:
    usage = _one(record, "finished")["usage"]
    usage["cached_prompt_tokens"] = usage["prompt_tokens"]
    return True


@_alteration("a frame is missing on the timeline")
def _frame_missing(record: Record) -> bool:
    frames = _one(record, "started")["frames"]
    return bool(frames) and bool(frames.pop())


@_alteration("a frame has another time")
def _frame_at_another_time(record: Record) -> bool:
    for frame in _one(record, "started")["frames"]:
        if frame["offset"] is not None:
            frame["offset"] += 1.0
            return True
    return False


@_alteration("a token is told to see a frame less")
def _token_sees_less(record: Record) -> bool:
    seen = _tokens(record)[-1]
    seen["visible"] -= 1
    return True


@_alteration("frames are seen from the second token on")
def _visible_late(record: Record) -> bool:
    _one(record, "visible")["index"] = 1
    return True


def sound(records: list[Record]) -> list[Record]:
    """Those that can be altered: whole answers."""
    return [record for record in records if record.end == "whole"]
