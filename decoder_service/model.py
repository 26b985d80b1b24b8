"""What all timelines of a decoder share: the engine and its thread, the scheduler, tokenizer, template, store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from chiasm.cache.form import Form
from chiasm.cache.store import EntryStore
from chiasm.errors import InvalidRequest, Overloaded, ServerError
from chiasm.failpoints import Step, nowhere
from chiasm.models.entries import identity_of
from chiasm.models.family import Prompt
from chiasm.models.forms import attachable
from chiasm.models.offloading import Offloading
from chiasm.pulse import Pulse, PulsedThreads
from chiasm.timeline import UnitName
from decoder_service.drawer import Drawer
from decoder_service.engine import DecoderEngine, Work
from decoder_service.fitting import Limits
from decoder_service.guide import Guides
from decoder_service.kept_states import KeptStates, StatesRoom
from decoder_service.prefix import domain_of
from decoder_service.rejections import Rejections
from decoder_service.room import Room
from decoder_service.sampler import Draw, Drawn, draw_rows
from decoder_service.scheduler import Scheduler
from decoder_service.seats import Outcome, Plan, Seat
from decoder_service.sequence import DecodeSequence
from decoder_service.states import Gathering, state_of
from decoder_service.stepping import Result, Stepping

P = ParamSpec("P")
R = TypeVar("R")

MAX_ROWS = 512
"""Rows of one step, where nothing else is said."""

STATES_BYTES = 1 << 30
"""Of states on the host, where nothing else is said."""

MAX_UNITS = 64
"""Units attached in one step, where nothing else is said."""

LARGE_TEXT = 1 << 16
"""Bytes from which tokenising takes long enough to be waited for."""


class _Asked(NamedTuple):
    """Of one sequence in a step.

    Attributes:
        drawer: a token is drawn from its last row.
        state: the state of that is taken.
        gathering: the states of all rows are; they are `complete` with them.
    """

    seat: Seat[DecodeSequence]
    rows: int
    drawer: Drawer | None
    state: bool
    gathering: Gathering | None = None
    complete: bool = False

    @property
    def work(self) -> Work:
        if self.gathering is not None:
            return Work(self.seat.sequence, self.rows, "all", layers=self.gathering.layers)
        wanted: Literal["none", "last"] = "last" if self.state or self.drawer is not None else "none"
        return Work(self.seat.sequence, self.rows, wanted, self.state)

    def gathered(self, states_lme: Tensor) -> Outcome:
        """Takes the states of its rows, which are computed."""
        assert self.gathering is not None, "nothing else is asked for its states"
        sequence = self.seat.sequence
        error = self.gathering.add(sequence.computed - self.rows, states_lme, of=len(sequence.timeline))
        return error or (self.gathering if self.complete else None)


class DecoderModel:
    """One model of a decoder. Used from one event loop.

    Args:
        fingerprint, text_fingerprint: of the checkpoint, as `Checkpoint` has them.
        workers_secret: what all workers of a fleet share to tag entries, 32 bytes.
        max_rows, max_units, max_running: as `Scheduler` has them.
        form: of entries that it would have; by default the plainest that there is.
        states_bytes: of all states that are gathered and sent at a time, at most.
        step: is told of `attach` and `step`, in the device's thread, before a unit is attached or a step computed
            (`chiasm.failpoints`).

    Attributes:
        forms: of entries that it attaches, the preferred one first.
        scheduler: who runs next, and who has room.
        rejections: entries that were not believed.
        states: those of prompts that were asked for before.
        states_room: for those that are asked for now.
        stepping: the loop that computes it. Tokens are drawn in the device's thread, because a vocabulary is large.
    """

    def __init__(
        self,
        engine: DecoderEngine,
        prompt: Prompt,
        *,
        fingerprint: str,
        text_fingerprint: bytes,
        store: EntryStore,
        workers_secret: bytes,
        max_rows: int = MAX_ROWS,
        max_units: int = MAX_UNITS,
        max_running: int | None = None,
        form: Form | None = None,
        states_bytes: int = STATES_BYTES,
        step: Step = nowhere,
    ) -> None:
        self.engine = engine
        self._reach = step
        self.forms = attachable(engine.half, form or engine.half.entry_shape.forms[0])
        self.prompt = prompt
        self.store = store
        self.rejections = Rejections()
        self.workers_secret = workers_secret
        self.identity = identity_of(engine.processor, fingerprint=fingerprint, dtype=engine.half.dtype)
        self.identity_digest = self.identity.digest()
        self.text_fingerprint = text_fingerprint
        self._fingerprint = fingerprint
        self.vocabulary = engine.half.vocab_size
        self.context_limit = engine.half.max_positions
        self.text_capacity = engine.pages.total * engine.pages.page_size
        self.limits = Limits(self.context_limit, self.text_capacity, engine.extents.total)
        self.silence_id = prompt.silence_id
        self.states_room = StatesRoom(states_bytes)
        self.states = KeptStates(
            store,
            width=engine.half.width,
            dtype=engine.half.dtype,
            deterministic=engine.deterministic,
            workers_secret=workers_secret,
        )
        self.guides = Guides(prompt, self.vocabulary)
        self.scheduler: Scheduler[DecodeSequence] = Scheduler(
            engine.holdings, max_rows=max_rows, max_units=max_units, max_running=max_running
        )
        self.stepping: Stepping[DecodeSequence] = Stepping(self.scheduler, self._step)
        self._readers: dict[DecodeSequence, Drawer | Gathering | None] = {}
        self._closed = False
        self._device = PulsedThreads(1, "decoder")
        self._large_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._offloading = Offloading(
            engine.residence, self.run, lambda: len(self._readers) > 0, captured=engine.captured
        )

    @property
    def pulse(self) -> Pulse:
        """Of the device's thread."""
        return self._device.pulse

    @property
    def running(self) -> int:
        """Timelines that have room."""
        return self.scheduler.running

    @property
    def waiting(self) -> int:
        """Timelines that wait for room."""
        return self.scheduler.waiting

    def sequence(self, root: bytes) -> DecodeSequence:
        """A new, empty sequence of a tenant, who shares with nobody else. Raises Unavailable OFFLOADED if the weights
        are not on the device, or are leaving it."""
        self._offloading.check()
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

    async def _step(self, plan: Plan[DecodeSequence]) -> Result[DecodeSequence]:
        return await self.run(self._compute, plan)

    def _compute(self, plan: Plan[DecodeSequence]) -> Result[DecodeSequence]:
        """In the device's thread. A fault of one is its own, whoever it runs with."""
        units = [self._attached(unit.work) for unit in plan.units]
        asked = [self._asked(seat, 1, draws=True) for seat in plan.singles]
        asked += [self._asked(seat, rows, draws=draws) for seat, rows, draws in plan.shares]
        outcomes = self._computed(asked)
        failed = any(isinstance(outcome, Exception) for outcome in outcomes)
        if failed:
            for one, outcome in zip(asked, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    self.engine.holdings.forget(one.seat.sequence)  # nobody shares what led to that
        ended = [
            one.seat
            for one, outcome in zip(asked, outcomes, strict=True)
            if isinstance(outcome, Drawn) and outcome.ends
        ]
        return Result(units, outcomes, failed, ended)

    def _asked(self, seat: Seat[DecodeSequence], rows: int, *, draws: bool) -> _Asked:
        reader = self._readers[seat.sequence]
        if isinstance(reader, Gathering):
            return _Asked(seat, rows, None, state=False, gathering=reader, complete=draws)
        return _Asked(seat, rows, reader if draws else None, state=draws and reader is None)

    def _attached(self, work: Callable[[], None]) -> Exception | None:
        """Why a unit was not attached."""
        try:
            self._reach("attach")
            work()
        except Exception as error:
            return error
        return None

    def _computed(self, asked: Sequence[_Asked]) -> list[Outcome]:
        if not asked:
            return []
        try:
            self._reach("step")
            found = self.engine.step([one.work for one in asked])
        except Exception as error:
            if len(asked) == 1:
                return [error]
            return [outcome for one in asked for outcome in self._computed([one])]
        drawing = [(row[-1], one.drawer) for one, row in zip(asked, found, strict=True) if one.drawer is not None]
        drawn = iter(_drawn([row for row, _ in drawing], [drawer.next() for _, drawer in drawing]))
        outcomes: list[Outcome] = []
        for one, row in zip(asked, found, strict=True):
            if one.drawer is not None:
                outcomes.append(_drew(one.drawer, next(drawn)))
            elif one.gathering is not None:
                outcomes.append(one.gathered(row))
            else:
                outcomes.append(state_of(row[-1]) if one.state else None)
        return outcomes

    def check_fits(self, *, text: int, visual: int) -> None:
        """Raises InvalidRequest NEVER_FITS for a timeline larger than a pool."""
        for what, needed, capacity in (
            ("text tokens", text, self.text_capacity),
            ("visual tokens", visual, self.engine.extents.total),
        ):
            if needed > capacity:
                raise InvalidRequest(
                    "NEVER_FITS",
                    f"{needed} {what} are needed, the pool holds {capacity}",
                    facts={"needed": needed, "capacity": capacity},
                )

    def seat(
        self,
        sequence: DecodeSequence,
        reader: Drawer | Gathering | None,
        *,
        wake: Callable[[], None],
        tenant: bytes,
        priority: int,
        stops: frozenset[int],
    ) -> Seat[DecodeSequence]:
        """A place among those who are computed. It ends with `release`.

        Args:
            reader: draws its tokens, or takes the states of all its rows; None for one whose last row's state is taken.
        """
        self._readers[sequence] = reader
        return self.scheduler.seat(sequence, wake=wake, tenant=tenant, priority=priority, stops=stops)

    def enter(self, seat: Seat[DecodeSequence]) -> None:
        """Lets a timeline wait for the room it takes as it is laid, and for the next token. What others hold already
        and this one can share takes none.

        Raises InvalidRequest NEVER_FITS for one that has grown to more than a pool: everybody would wait behind it.
        """
        timeline = seat.sequence.timeline
        self.check_fits(text=seat.sequence.due_rows, visual=timeline.vision_tokens)
        self.scheduler.enter(seat, Room(self._pages(seat.sequence.due_rows), timeline.vision_tokens))
        self.stepping.poke()

    def want(self, seat: Seat[DecodeSequence], rows: int, *, draws: bool, allowed: int) -> None:
        """`Scheduler.want`, soon."""
        self.scheduler.want(seat, rows, draws=draws, allowed=allowed)
        self.stepping.poke()

    def _pages(self, rows: int) -> int:
        return -(-rows // self.engine.pages.page_size)

    async def keep_within(self, seat: Seat[DecodeSequence], *, grow: bool) -> None:
        """Holds a timeline that has room, and was laid anew or has grown, against what it was promised.

        Args:
            grow: more visual tokens may be promised: if need be those of sequences that have come later or are of lower
                priority, but nobody waits for them, for two timelines that wait for each other's would wait for ever.

        One that still waits for room waits for what it takes by now.

        Raises Overloaded KV_POOL_FULL if they are not to be had, ServerError FEATURE_COUNT_MISMATCH for a timeline that
        must not grow and has, InvalidRequest NEVER_FITS for one that waits for more than a pool holds.
        """
        holdings, timeline = self.engine.holdings, seat.sequence.timeline
        need = Room(self._pages(seat.sequence.due_rows), timeline.vision_tokens)
        if not seat.admitted:
            if seat.need is not None:
                self.check_fits(text=seat.sequence.due_rows, visual=timeline.vision_tokens)
                seat.need = need
                self.freed()  # it may be less than before
            return
        if not grow:
            promised = holdings.promise(seat.sequence)
            if need.pages > promised.pages or need.visual > promised.visual:
                raise ServerError(
                    "FEATURE_COUNT_MISMATCH",
                    f"{need.visual} visual tokens, {need.pages} pages are laid; "
                    f"admitted: {promised.visual}, {promised.pages}",
                    facts={"got": need.visual, "needed": promised.visual},
                )

        def fits() -> bool:
            try:
                holdings.keep_within(seat.sequence, need.visual)
            except Overloaded:
                return False
            return True

        # Nobody makes way for what no pool can hold.
        possible = need.visual <= self.engine.extents.total
        if not fits() and not (possible and await self.stepping.make_way(seat, fits)) and seat.admitted:
            holdings.keep_within(seat.sequence, need.visual)

    def hold(self, seat: Seat[DecodeSequence], name: UnitName) -> bool:
        """Gives a sequence that has room a unit that is here at its place. False if it is not."""
        held = seat.admitted and self.engine.holdings.hold_unit(seat.sequence, name)
        if held:
            self.freed()  # what it shares it leaves to others
        return held

    def share(self, sequence: DecodeSequence) -> None:
        """Lets others find the rows that a sequence has computed. Not while it is in a step."""
        self.engine.holdings.share(sequence)

    def freed(self) -> None:
        """Whoever waits for room may have it now."""
        if self.scheduler.waiting:
            self.scheduler.freed()
            self.stepping.poke()

    def flush(self) -> None:
        """Forgets what is kept for requests to come. What running ones hold is freed when they end."""
        self.engine.holdings.flush()

    async def release(self, seat: Seat[DecodeSequence]) -> None:
        """Gives back everything a timeline holds, after the step that is running. Others find what it has computed."""
        self.scheduler.retire(seat)
        try:
            await self.run(self.engine.holdings.release, seat.sequence, share=seat.error is None)
        finally:
            self.scheduler.leave(seat)
            self._readers.pop(seat.sequence, None)
            self._offloading.finished()
        if not self._closed:
            self.freed()

    async def offload(self) -> None:
        """Takes the weights off the device, when every timeline that was let in has ended; one that is live ends when
        its caller wants. Until they are back new ones are refused with Unavailable OFFLOADED. What is kept for requests
        to come stays. Cancelled while it waits for timelines it has changed nothing.

        Raises Unsupported OFFLOAD_CAPTURED where steps are CUDA graphs, SettingsError if the host has no room.
        """
        await self._offloading.offload()

    async def load(self) -> None:
        """Brings the weights back. Raises what torch raises if there is no room for them on the device."""
        await self._offloading.load()

    async def close(self) -> None:
        self._closed = True
        await self.stepping.close()
        await asyncio.to_thread(self._device.shutdown)
        await asyncio.to_thread(self._large_texts.shutdown, cancel_futures=True)


def _drew(drawer: Drawer, outcome: Outcome) -> Outcome:
    """Lays what was drawn, if it was; what went wrong with that is the sequence's own."""
    if isinstance(outcome, Drawn):
        try:
            drawer.drew(outcome)
        except Exception as error:
            return error
    return outcome


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
