"""Bugs of routers: media and answers that are mixed up, calls that nobody ends, tries that are one too many."""

from __future__ import annotations

from typing import Any

import chiasm.rpc.medium
import encoder_service.material
import router.computing
from chiasm.rpc.v1 import router_pb2 as rpb
from router.answer import Answer
from router.coordinator import Coordinator
from router.encoding import Encoding
from router.media import Inline
from router.work import Work
from tests.telltale.plants.planting import Garden, Planted
from tests.telltale.plants.trusting import trust_routers

GARDEN = Garden("router")


@GARDEN("the bytes of a medium are those of another one of its request")
def _bytes_of_a_sibling(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def init(self: Work, fleet: Any, model: Any, asked: Any, sources: Any, *rest: Any, **named: Any) -> None:
            if len(sources) > 1:
                bug.hit()
                sources = [sources[-1], *sources[1:]]
            before(self, fleet, model, asked, sources, *rest, **named)

        return init

    bug.patch(Work, "__init__", make)


@GARDEN("all media of a kind have one digest, whoever computes it")
def _digest_of_nothing(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def digest(piece: bytes) -> Any:
            bug.hit()
            return before(b"")

        return digest

    for module in (chiasm.rpc.medium, encoder_service.material):
        bug.patch(module, "part_digest", make)


@GARDEN("entries are announced for the medium before")
def _ready_for_a_sibling(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def ready(medium: Encoding, response: Any) -> Any:
            made = before(medium, response)
            if made.ready.slot:
                bug.hit()
                made.ready.slot -= 1
            return made

        return ready

    bug.patch(router.computing, "ready_at", make)


@GARDEN("sizes are told for another medium")
def _sized_for_a_sibling(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def sized(self: Coordinator, medium: Encoding) -> Any:
            made = before(self, medium)
            if len(self.media) > 1:
                bug.hit()
                made.sized.slot = len(self.media) - 1 - made.sized.slot
            return made

        return sized

    bug.patch(Coordinator, "_sized_at", make)


@GARDEN("an answer that has begun is begun again elsewhere", hurt="decoders", pace=0.02)
def _begun_again(bug: Planted) -> None:
    """The tokens that are out are forgotten, and the client takes whatever comes."""

    def make(before: Any) -> Any:
        def begin(self: Coordinator, worker: Any) -> Any:
            if self._answer.tokens:
                bug.hit()
                self._answer = Answer(len(self._answer._ids))
            return before(self, worker)

        return begin

    bug.patch(Coordinator, "_begin", make)
    trust_routers(bug)


@GARDEN("calls go on when a client has left")
def _cancel_swallowed_by_router(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def end(self: Work) -> None:
            if any(not task.done() for task in self._tasks):
                bug.hit()

        return end

    bug.patch(Work, "end", make)


def _event(bug: Planted, change: Any) -> None:
    """Events of an answer are changed on their way."""

    def make(before: Any) -> Any:
        async def run(self: Coordinator) -> Any:
            async for event in before(self):
                changed = change(self, event)
                bug.hits += changed is not None
                for one in [event] if changed is None else changed:
                    yield one

        return run

    bug.patch(Coordinator, "run", make)


@GARDEN("a token is that of another answer")
def _token_of_another_answer(bug: Planted) -> None:
    last: dict[int, tuple[Coordinator, list[int]]] = {}

    def change(coordinator: Coordinator, event: Any) -> Any:
        if event.WhichOneof("event") != "tokens":
            return None
        index, ids = event.tokens.index, [*event.tokens.ids]
        other = last.get(index)
        last[index] = coordinator, ids
        if other is None or other[0] is coordinator or other[1] == ids or len(ids) != len(other[1]):
            return None
        event.tokens.ids[:] = other[1]
        return [event]

    _event(bug, change)


@GARDEN("two events change places, and clients take what comes")
def _events_swapped(bug: Planted) -> None:
    trust_routers(bug)
    held: dict[Coordinator, Any] = {}

    def change(coordinator: Coordinator, event: Any) -> Any:
        if coordinator in held:
            return [event, held.pop(coordinator)]
        if event.WhichOneof("event") == "tokens" and event.tokens.index == 1:
            held[coordinator] = event
            return []
        return None

    _event(bug, change)


@GARDEN("an event is sent twice, and clients take what comes")
def _event_sent_twice(bug: Planted) -> None:
    trust_routers(bug)

    def change(coordinator: Coordinator, event: Any) -> Any:
        if event.WhichOneof("event") == "tokens" and event.tokens.index == 1:
            return [event, event]
        return None

    _event(bug, change)


@GARDEN("the end of an answer overtakes its last token, and clients take what comes")
def _end_overtakes(bug: Planted) -> None:
    trust_routers(bug)
    held: dict[Coordinator, Any] = {}

    def change(coordinator: Coordinator, event: Any) -> Any:
        which = event.WhichOneof("event")
        before = held.pop(coordinator, None)
        if which == "tokens":
            held[coordinator] = event
            return [] if before is None else [before]
        if which == "finished" and before is not None:
            return [event, before]
        return None if before is None else [before, event]

    _event(bug, change)


@GARDEN("an answer ends twice")
def _end_sent_twice(bug: Planted) -> None:
    _event(bug, lambda coordinator, event: [event, event] if event.WhichOneof("event") == "finished" else None)


@GARDEN("an answer whose stream breaks off ends as if it were whole")
def _end_swallowed(bug: Planted) -> None:
    _event(bug, lambda coordinator, event: [] if event.WhichOneof("event") == "finished" else None)


@GARDEN("a request that is refused is answered with nothing")
def _refusal_swallowed(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def failed(self: Coordinator, error: Exception) -> None:
            bug.hit()
            await self._window.put(rpb.GenerateResponse())
            self._window.end()

        return failed

    bug.patch(Coordinator, "failed", make)


@GARDEN("media are used as the first one was")
def _usage_of_the_first(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def accounted(self: Coordinator, finished: Any) -> Any:
            made = await before(self, finished)
            media = made.usage.media
            if len(media) > 1 and media[0] != media[1]:
                bug.hit()
                media[1].CopyFrom(media[0])
            return made

        return accounted

    bug.patch(Coordinator, "_accounted", make)


@GARDEN("another seed is told than the client's")
def _seed_of_its_own(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def opened(self: Coordinator) -> Any:
            bug.hit()
            made = before(self)
            made.seed ^= 1
            return made

        return opened

    bug.patch(Coordinator, "_opened", make)


@GARDEN("the first piece of a file is all of it")
def _file_cut_off(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def chunks(self: Inline) -> Any:
            async for chunk in before(self):
                if len(chunk.data) > 64 and chunk.frame == 0:
                    bug.hit()
                    chunk.data = chunk.data[: len(chunk.data) // 2]
                yield chunk

        return chunks

    bug.patch(Inline, "chunks", make)
