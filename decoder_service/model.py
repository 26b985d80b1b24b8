"""What all timelines of a decoder share: the engine and its thread, the scheduler, tokenizer and template, the store,
the reservations."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from chiasm.cache.store import EntryStore
from chiasm.errors import InvalidRequest, ServerError
from chiasm.models.entries import identity_of
from chiasm.models.family import Prompt
from chiasm.timeline import UnitName
from decoder_service.engine import DecoderEngine, Work
from decoder_service.fitting import Limits
from decoder_service.guide import Guides
from decoder_service.holdings import Room
from decoder_service.prefix import domain_of
from decoder_service.sampler import Draw, draw_rows
from decoder_service.scheduler import Outcome, Scheduler, Share
from decoder_service.sequence import DecodeSequence

P = ParamSpec("P")
R = TypeVar("R")

MAX_ROWS = 512
"""Rows of one step, where nothing else is said."""

LARGE_TEXT = 1 << 16
"""Bytes from which tokenising takes long enough to be waited for."""


class DecoderModel:
    """One model of a decoder. Used from one event loop.

    Args:
        fingerprint: of the checkpoint (`Checkpoint.fingerprint`).
        workers_secret: what all workers of a fleet share to tag entries, 32 bytes.
        max_rows: of one step, over all sequences.

    Attributes:
        scheduler: who runs next. It draws in the device's thread, because a vocabulary is large.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        prompt: Prompt,
        *,
        fingerprint: str,
        store: EntryStore,
        workers_secret: bytes,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.engine = engine
        self.prompt = prompt
        self.store = store
        self.workers_secret = workers_secret
        self.identity = identity_of(
            engine.half.entry_shape, engine.processor, fingerprint=fingerprint, dtype=engine.half.dtype
        )
        self.identity_digest = self.identity.digest()
        self._fingerprint = fingerprint
        self.vocabulary = engine.half.vocab_size
        self.context_limit = engine.half.max_positions
        self.text_capacity = engine.pages.total * engine.pages.page_size
        self.limits = Limits(self.context_limit, self.text_capacity, engine.extents.total)
        self.silence_id = prompt.silence_id
        self.guides = Guides(prompt, self.vocabulary)
        self.scheduler: Scheduler[DecodeSequence, Draw] = Scheduler(self._step, max_rows=max_rows)
        self._device = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        self._large_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._turns: deque[object] = deque()  # who waits for room, in order
        self._freed = asyncio.Condition()

    @property
    def running(self) -> int:
        """Timelines that have room reserved."""
        return self.engine.holdings.sequences

    @property
    def waiting(self) -> int:
        """Timelines that wait for room."""
        return len(self._turns)

    def sequence(self, root: bytes) -> DecodeSequence:
        """A new, empty sequence of a tenant, who shares with nobody else."""
        return self.engine.sequence(domain_of(root, self.identity_digest, self._fingerprint))

    def token_bytes(self, token: int) -> bytes:
        return self.prompt.token_bytes(token)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method of the engine in the device's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._device, lambda: function(*args, **kwargs))

    async def tokenise(self, size: int, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a function that tokenises `size` bytes of text, in a thread. Large texts go one by one: they wait for
        each other, and nobody else waits for them."""
        pool = self._large_texts if size > LARGE_TEXT else None
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: function(*args, **kwargs))

    async def _step(self, shares: Sequence[Share[DecodeSequence, Draw]]) -> Sequence[Outcome]:
        return await self.run(self._compute, shares)

    def _compute(self, shares: Sequence[Share[DecodeSequence, Draw]]) -> list[Outcome]:
        works = [Work(share.sequence, share.rows, "last" if share.draw else "none") for share in shares]
        logits = self.engine.step(works)
        drawing = [(logits_rv[-1], share.draw) for share, logits_rv in zip(shares, logits, strict=True) if share.draw]
        drawn = iter(_drawn([row for row, _ in drawing], [draw for _, draw in drawing]))
        return [next(drawn) if share.draw else None for share in shares]

    async def reserve(self, sequence: DecodeSequence, *, text: int, visual: int) -> None:
        """Waits, first come first served, until both pools have room for a whole timeline, and promises it. What
        others hold already and this one can share takes no room.

        A timeline that is promised all it may need before it begins can neither starve nor deadlock another.

        Raises InvalidRequest NEVER_FITS for a timeline larger than a pool.
        """
        size = self.engine.pages.page_size
        need = Room(-(-text // size), visual)
        for what, needed, capacity in (
            ("text tokens", need.pages * size, self.text_capacity),
            ("visual tokens", visual, self.engine.extents.total),
        ):
            if needed > capacity:
                raise InvalidRequest(
                    "NEVER_FITS",
                    f"{needed} {what} are needed, the pool holds {capacity}",
                    facts={"needed": needed, "capacity": capacity},
                )
        turn = object()
        self._turns.append(turn)
        try:
            async with self._freed:
                await self._freed.wait_for(
                    lambda: self._turns[0] is turn and self.engine.holdings.admit(sequence, need)
                )
        finally:
            self._turns.remove(turn)
            await self._wake()

    async def keep_within(self, sequence: DecodeSequence, *, text: int, visual: int, grow: bool) -> None:
        """Holds a timeline that was laid anew or has grown against its reservation.

        Args:
            grow: more visual tokens may be reserved if they are free. It does not wait for them: two timelines that
                wait for each other's room would wait for ever.

        Raises Overloaded KV_POOL_FULL if they are not free, ServerError FEATURE_COUNT_MISMATCH for a timeline that
        must not grow and has.
        """
        promised = self.engine.holdings.promise(sequence)
        need = Room(-(-text // self.engine.pages.page_size), visual)
        if need.pages > promised.pages or (need.visual > promised.visual and not grow):
            raise ServerError(
                "FEATURE_COUNT_MISMATCH",
                f"{need.visual} visual tokens, {need.pages} pages are laid; "
                f"admitted: {promised.visual}, {promised.pages}",
                facts={"got": need.visual, "needed": promised.visual},
            )
        self.engine.holdings.keep_within(sequence, visual)

    async def hold(self, sequence: DecodeSequence, name: UnitName) -> bool:
        """Gives a sequence a unit that is here at its place. False if it is not."""
        held = self.engine.holdings.hold_unit(sequence, name)
        if held:
            await self._wake()  # what it shares it leaves to others
        return held

    async def attach(self, sequence: DecodeSequence, name: UnitName, payload: Tensor) -> None:
        """`DecoderEngine.attach`, in the device's thread."""
        await self.run(self.engine.attach, sequence, name, payload)
        await self._wake()  # who waits for room may wait for that unit

    async def share(self, sequence: DecodeSequence) -> None:
        """Lets others find the rows that a sequence has computed, and gives it the next ones that others have."""
        if self.engine.holdings.share(sequence):
            await self._wake()

    def forget(self, sequence: DecodeSequence) -> None:
        """Lets nobody share any more what a sequence holds: its logits were not what they should be."""
        self.engine.holdings.forget(sequence)

    def flush(self) -> None:
        """Forgets what is kept for requests to come. What running ones hold is freed when they end."""
        self.engine.holdings.flush()

    async def release(self, sequence: DecodeSequence) -> None:
        """Gives back everything a timeline holds or has reserved, after the step that is running."""
        self.scheduler.leave(sequence)
        await self.run(self.engine.release, sequence)
        await self._wake()

    async def _wake(self) -> None:
        if self._turns:
            async with self._freed:
                self._freed.notify_all()

    async def close(self) -> None:
        await self.scheduler.close()
        await asyncio.to_thread(self._device.shutdown)
        await asyncio.to_thread(self._large_texts.shutdown, cancel_futures=True)


def _drawn(logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[Outcome]:
    """A token for each of the (vocabulary,) logits, or why none could be drawn: that is the sequence's own fault and
    nobody else's."""
    if not draws:
        return []
    try:
        return [*draw_rows(torch.stack([*logits]), draws)]
    except Exception as error:
        if len(draws) == 1:
            return [error]
        return [outcome for row, draw in zip(logits, draws, strict=True) for outcome in _drawn([row], [draw])]
