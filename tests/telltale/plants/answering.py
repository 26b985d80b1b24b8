"""Bugs of what is told of an answer: tokens, text, visibility, ends."""

from __future__ import annotations

from typing import Any

from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service.answer import Answer
from decoder_service.detokenizer import Detokenizer
from decoder_service.stops import StopStrings
from tests.telltale.plants.planting import Garden, Planted
from tests.telltale.plants.trusting import trust_decoders, trust_routers

GARDEN = Garden("decoder")


def _told(bug: Planted, change: Any) -> None:
    """What is told is changed on its way: `change` takes the message's kind, the message and the answer, and gives the
    messages that are told, or None to leave it."""

    def make(before: Any) -> Any:
        def responses(self: Answer) -> Any:
            out: list[Any] = []
            for response in before(self):
                which = response.WhichOneof("message")
                changed = change(which, response, self)
                bug.hits += changed is not None
                out += [response] if changed is None else changed
            return out

        return responses

    bug.patch(Answer, "responses", make)


def _copy(response: Any) -> Any:
    copied = type(response)()
    copied.CopyFrom(response)
    return copied


def _token_changed(bug: Planted, change: Any, at: int = 2) -> None:
    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which != "tokens" or response.tokens.index != at:
            return None
        return change(response)

    _told(bug, changed)


@GARDEN("a token is told twice, and routers and clients take what comes")
def _token_told_twice(bug: Planted) -> None:
    trust_decoders(bug)
    trust_routers(bug)
    _token_changed(bug, lambda response: [response, _copy(response)])


@GARDEN("a token is told twice, under two indices")
def _token_told_again(bug: Planted) -> None:
    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which == "tokens" and response.tokens.index >= 2:
            again = _copy(response)
            again.tokens.index += 1
            return [response, again] if response.tokens.index == 2 else [again]
        return None

    _told(bug, changed)


@GARDEN("a token is not told")
def _token_lost(bug: Planted) -> None:
    _token_changed(bug, lambda response: [])


@GARDEN("a token is not told, and the others close up")
def _token_lost_silently(bug: Planted) -> None:
    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which == "tokens" and response.tokens.index >= 2:
            if response.tokens.index == 2:
                return []
            response.tokens.index -= 1
            return [response]
        return None

    _told(bug, changed)


@GARDEN("two tokens are told in the other order")
def _tokens_swapped(bug: Planted) -> None:
    held: dict[Answer, Any] = {}

    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which == "tokens" and response.tokens.index == 1:
            held[answer] = response
            return []
        first = held.pop(answer, None)
        if first is None:
            return None
        if which == "tokens":
            first.tokens.ids[0], response.tokens.ids[0] = response.tokens.ids[0], first.tokens.ids[0]
            first.tokens.text, response.tokens.text = response.tokens.text, first.tokens.text
        return [first, response]

    _told(bug, changed)


@GARDEN("indices begin at 1")
def _index_from_one(bug: Planted) -> None:
    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which != "tokens":
            return None
        response.tokens.index += 1
        return [response]

    _told(bug, changed)


@GARDEN("another id is told than was drawn")
def _another_id_told(bug: Planted) -> None:
    def change(response: Any) -> Any:
        response.tokens.ids[0] ^= 1
        return [response]

    _token_changed(bug, change, at=1)


@GARDEN("a character of the text is lost")
def _text_one_short(bug: Planted) -> None:
    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which != "tokens" or not response.tokens.text or response.tokens.index < 2:
            return None
        response.tokens.text = response.tokens.text.decode()[:-1].encode()
        return [response]

    _told(bug, changed)


@GARDEN("tokens are made into text one by one")
def _characters_torn(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def push(self: Detokenizer, data: bytes) -> str:
            bug.hit()
            return data.decode("utf-8", errors="replace")

        return push

    bug.patch(Detokenizer, "push", make)


@GARDEN("what is left of a character at the end is not told")
def _last_character_lost(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def finish(self: Detokenizer) -> str:
            bug.hits += bool(before(self))
            return ""

        return finish

    bug.patch(Detokenizer, "finish", make)


@GARDEN("what may be a stop string is told at once")
def _stop_not_held_back(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def held(self: StopStrings, text: str) -> int:
            bug.hits += bool(before(self, text))
            return 0

        return held

    bug.patch(StopStrings, "_open", make)


@GARDEN("stop strings stop nothing")
def _stop_ignored(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def match(self: StopStrings, text: str, start: int) -> None:
            bug.hits += before(self, text, start) is not None

        return match

    bug.patch(StopStrings, "_match", make)


@GARDEN("a stop string is part of the text")
def _stop_told(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def match(self: StopStrings, text: str, start: int) -> Any:
            found = before(self, text, start)
            if found is None:
                return None
            bug.hit()
            return found[0] + len(found[1]), found[1]

        return match

    bug.patch(StopStrings, "_match", make)


@GARDEN("answers end a token early")
def _ends_early(bug: Planted) -> None:
    _limit(bug, -1)


@GARDEN("answers end a token late")
def _ends_late(bug: Planted) -> None:
    _limit(bug, 1)


def _limit(bug: Planted, more: int) -> None:
    def make(before: Any) -> Any:
        def admit(self: Answer, room: int, *, queued: float) -> None:
            bug.hit()
            before(self, max(room + more, 1), queued=queued)

        return admit

    bug.patch(Answer, "admit", make)


def _finish_changed(bug: Planted, change: Any) -> None:
    def changed(which: str, response: Any, answer: Answer) -> Any:
        return change(response) if which == "finished" else None

    _told(bug, changed)


@GARDEN("an answer that was cut says that it stopped")
def _length_for_stop(bug: Planted) -> None:
    def change(response: Any) -> Any:
        if response.finished.reason != pb.FINISH_REASON_LENGTH:
            return None
        response.finished.reason = pb.FINISH_REASON_STOP
        return [response]

    _finish_changed(bug, change)


@GARDEN("the stop string that came is not named")
def _stop_not_named(bug: Planted) -> None:
    def change(response: Any) -> Any:
        if not response.finished.stop:
            return None
        response.finished.stop = ""
        return [response]

    _finish_changed(bug, change)


@GARDEN("the end of an answer is not told")
def _end_lost(bug: Planted) -> None:
    _finish_changed(bug, lambda response: [])


def _used(bug: Planted, change: Any) -> None:
    def make(before: Any) -> Any:
        def used(self: Answer) -> Any:
            bug.hit()
            usage = before(self)
            change(usage)
            return usage

        return used

    bug.patch(Answer, "used", make)


@GARDEN("the prompt is said to be a token shorter")
def _prompt_one_short(bug: Planted) -> None:
    _used(bug, lambda usage: setattr(usage, "prompt_tokens", usage.prompt_tokens - 1))


@GARDEN("visual tokens are counted as text")
def _visual_tokens_in_prompt(bug: Planted) -> None:
    _used(bug, lambda usage: setattr(usage, "prompt_tokens", usage.prompt_tokens + usage.visual_tokens))


@GARDEN("all of a prompt is said to have been known")
def _prompt_was_known(bug: Planted) -> None:
    _used(bug, lambda usage: setattr(usage, "cached_prompt_tokens", usage.prompt_tokens - 1))


@GARDEN("a frame less is said to be seen")
def _visible_told_short(bug: Planted) -> None:
    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which != "visible" or not response.visible.count:
            return None
        response.visible.count -= 1
        return [response]

    _told(bug, changed)


@GARDEN("visibility is told behind the first token")
def _visible_told_late(bug: Planted) -> None:
    held: dict[Answer, Any] = {}

    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which == "visible":
            held[answer] = response
            return []
        if which == "tokens" and answer in held:
            return [response, held.pop(answer)]
        return None

    _told(bug, changed)


@GARDEN("frames are said to be seen a token too early")
def _frames_told_early(bug: Planted) -> None:
    def changed(which: str, response: Any, answer: Answer) -> Any:
        if which != "started" or not response.started.frames:
            return None
        for frame in response.started.frames:
            frame.at_index -= 1
        return [response]

    _told(bug, changed)


@GARDEN("what is on the timeline is not told")
def _start_lost(bug: Planted) -> None:
    _told(bug, lambda which, response, answer: [] if which == "started" else None)
