"""A fleet over a membership: addresses that are asked again and again who they are. Whose addresses they are is not
known here: `router.static_fleet` has fixed ones, `router.ray_fleet` those of workers that Ray places.

A worker is chosen from while it answers `Info`, is not draining, and a partner of its fingerprint and reach answers
too. What is there to be asked changes as the membership does; nobody starts or stops workers here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeVar, cast

from chiasm.errors import Unavailable
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.choice import Affinity, choose_decoder, choose_encoder
from router.fleet import (
    DecoderCalls,
    DecoderWorker,
    EncoderCalls,
    EncoderWorker,
    Form,
    Served,
    common_form,
    does,
    speaks_as,
)
from router.member import Member, Members
from router.membership import Hopeless, Membership
from router.remote import RemoteDecoder, RemoteEncoder

_log = logging.getLogger(__name__)

W = TypeVar("W")

BEAT: Final = 1.0
"""Seconds between two questions to a worker that answers."""


class MemberFleet:
    """`Fleet` over channels.

    Args:
        membership: says which addresses there are.
        patience: seconds that a request waits for a worker, if none can take it.
        beat: seconds between two questions to a worker.
    """

    def __init__(self, membership: Membership, *, patience: float = 30.0, beat: float = BEAT) -> None:
        self._membership = membership
        self._patience = patience
        self._beat = beat
        self._changes = asyncio.Condition()
        self._telling: set[asyncio.Task[None]] = set()
        self._encoders = Members(("encoder",), self._encoder_at)
        self._decoders = Members(("decoder",), self._decoder_at)
        self._waits: dict[object, tuple[str, float]] = {}  # of requests for a worker: the model, and since when
        self._known: dict[str, Served] = {}
        self._affinity = Affinity()
        self._formless: set[tuple[str, tuple[str, ...], tuple[str, ...]]] = set()  # of which it was told
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to ask. Returns at once: workers may come later than their router."""
        await self._look_up()
        self._looking = asyncio.create_task(self._keep_looking(), name="fleet")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._encoders.close()
        await self._decoders.close()

    def _encoder_at(self, target: str) -> Member[EncoderCalls, epb.EncoderInfoResponse]:
        remote = RemoteEncoder(target)
        return Member(remote, remote.info, remote.close, self._tell, beat=self._beat)

    def _decoder_at(self, target: str) -> Member[DecoderCalls, dpb.DecoderInfoResponse]:
        remote = RemoteDecoder(target)
        return Member(remote, remote.info, remote.close, self._tell, beat=self._beat)

    # -- the protocol ------------------------------------------------------------------------------------------------

    def models(self) -> Mapping[str, Served]:
        current = self._pairs()
        for name, served in current.items():
            self._known[name] = served
        return {name: current.get(name, replace(served, ready=False)) for name, served in self._known.items()}

    async def known(self) -> Mapping[str, Served]:
        return await self._wait_for(lambda: self.models() or None, lambda: ("NOT_READY", "no worker has answered yet"))

    async def decoder(self, model: Served, *, keys: Sequence[bytes] = ()) -> DecoderWorker:
        def decoders() -> list[DecoderWorker]:
            return [w for w, info in self._decoders.up() if _serves(info, model) and speaks_as(w, model)]

        def choose() -> DecoderWorker | None:
            found = [worker for worker in decoders() if self._encoders_of(model, worker)]
            chosen = choose_decoder(found, keys, self._affinity)
            if chosen is None:
                self._check_replaced(model)
            return chosen

        return await self._wait_for(
            choose, lambda: _missing("encoder" if decoders() else "decoder", model), model=model.name
        )

    def count_encoders(self, model: Served, decoder: DecoderWorker) -> int:
        return len(self._encoders_of(model, decoder))

    async def encoder(self, model: Served, decoder: DecoderWorker, *, hint: bytes, rank: int = 0) -> EncoderWorker:
        def choose() -> EncoderWorker | None:
            chosen = choose_encoder(self._encoders_of(model, decoder), hint, rank)
            if chosen is None:
                self._check_replaced(model)
            return chosen

        return await self._wait_for(choose, lambda: _missing("encoder", model), model=model.name)

    def _check_replaced(self, model: Served) -> None:
        """Raises Unavailable MODEL_REPLACED if only others by the name of a model are left, of which nobody was told a
        token: one that comes again is given to those."""
        there = self._pairs().get(model.name)
        if there is not None and there.fingerprint != model.fingerprint and not model.text_fingerprint:
            raise Unavailable("MODEL_REPLACED", f"another model is served as {model.name} by now", retry_after=0.1)

    def lost(self, worker: EncoderWorker | DecoderWorker) -> None:
        self._encoders.doubt(worker)
        self._decoders.doubt(worker)

    def workers(self) -> Iterator[EncoderWorker | DecoderWorker]:
        """Whoever takes requests now."""
        yield from (worker for worker, _ in self._encoders.up())
        yield from (worker for worker, _ in self._decoders.up())

    # -- membership --------------------------------------------------------------------------------------------------

    def _pairs(self) -> dict[str, Served]:
        pairs: dict[str, Served] = {}
        for worker, info in self._decoders.up():
            for model in info.models:
                served = _served(model)
                if self._encoders_of(served, worker):
                    before = pairs.get(model.name)
                    same = before is not None and before.fingerprint == served.fingerprint
                    pairs[model.name] = _together(before, served) if before is not None and same else served
        return pairs

    def _encoders_of(self, model: Served, decoder: DecoderWorker) -> list[EncoderWorker]:
        """The encoders whose entries a decoder can read: of its own node if there are any, for what lies there is
        nearest."""
        fit = [w for w, info in self._encoders.up() if w.reach.meets(decoder.reach) and _serves(info, model)]
        speaks = [worker for worker in fit if common_form(worker, decoder, model.name) is not None]
        for worker in fit:
            if worker not in speaks:
                self._tell_formless(model.name, worker, decoder)
        return [worker for worker in speaks if worker.reach.arena == decoder.reach.arena] or speaks

    def _tell_formless(self, model: str, encoder: EncoderWorker, decoder: DecoderWorker) -> None:
        """Says, once of such forms, that two workers fit but for them."""
        made, taken = (tuple(_name(form) for form in worker.forms.get(model, ())) for worker in (encoder, decoder))
        if (model, made, taken) not in self._formless:
            self._formless.add((model, made, taken))
            _log.warning("no common form", extra={"model": model, "encoder": made, "decoder": taken})

    async def changed(self) -> None:
        """Returns when a worker has come or gone."""
        async with self._changes:
            await self._changes.wait()

    def takes_requests(self) -> bool:
        """Whether a model is served, or would be as soon as somebody asks."""
        return any(served.ready or self._membership.asleep(name) for name, served in self.models().items())

    def hopeless(self) -> Sequence[Hopeless]:
        """Why workers never come, as far as the membership knows."""
        return self._membership.hopeless

    def waits(self) -> Mapping[str, float]:
        """Seconds that the oldest request has waited for a worker of a model, by its name."""
        now = time.monotonic()
        oldest: dict[str, float] = {}
        for model, since in self._waits.values():
            oldest[model] = max(oldest.get(model, 0.0), now - since)
        return oldest

    async def _wait_for(
        self, choose: Callable[[], W | None], missing: Callable[[], tuple[str, str]], *, model: str | None = None
    ) -> W:
        chosen = choose()
        if chosen is not None:
            return chosen
        waiting = object()
        if model is not None:
            self._waits[waiting] = (model, time.monotonic())
        try:
            async with asyncio.timeout(self._patience), self._changes:
                return cast(W, await self._changes.wait_for(choose))
        except TimeoutError:
            raise Unavailable(*missing(), retry_after=1.0) from None
        finally:
            self._waits.pop(waiting, None)

    def _tell(self) -> None:
        telling = asyncio.create_task(self._notify())
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _notify(self) -> None:
        async with self._changes:
            self._changes.notify_all()

    async def _keep_looking(self) -> None:
        while True:
            with suppress(TimeoutError):  # members that were dropped are closed when they are idle, whatever changes
                async with asyncio.timeout(self._beat):
                    await self._membership.changed()
                    self._tell()  # it may say more than addresses
            await self._look_up()

    async def _look_up(self) -> None:
        await self._encoders.look_up(lambda _: self._membership.targets("encoder"))
        await self._decoders.look_up(lambda _: self._membership.targets("decoder"))


def _served(model: dpb.DecoderModel) -> Served:
    return Served(
        model.name,
        model.fingerprint,
        model.family,
        model.context_limit,
        model.layers,
        generates=does(model, rpb.OPERATION_GENERATE),
        embeds=does(model, rpb.OPERATION_EMBED),
        conditions=does(model, rpb.OPERATION_CONDITION),
    )


def _together(one: Served, other: Served) -> Served:
    """What two decoders of one model serve: one of them may be cut."""
    whole = max(one, other, key=lambda served: served.layers)
    return replace(
        whole,
        generates=one.generates or other.generates,
        embeds=one.embeds or other.embeds,
        conditions=one.conditions or other.conditions,
    )


def _serves(info: epb.EncoderInfoResponse | dpb.DecoderInfoResponse, model: Served) -> bool:
    """Of a decoder: and does what is asked."""
    return any(
        (m.name, m.fingerprint) == (model.name, model.fingerprint)
        and (not isinstance(m, dpb.DecoderModel) or does(m, model.asked, model.after))
        for m in info.models
    )


def _name(form: Form) -> str:
    return pb.EntryForm.Name(form) if form in pb.EntryForm.values() else str(form)


def _missing(role: str, model: Served) -> tuple[str, str]:
    """Reason and message."""
    return f"NO_READY_{role.upper()}", f"no {role} takes requests for {model.name}"
