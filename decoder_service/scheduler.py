"""Who runs next: one loop over all sequences of a model, which packs their next rows into steps.

Continuous batching: a sequence joins the next step whenever it has rows to compute and leaves it whenever it has none.
A step takes first the sequences that compute one row, whose callers wait for the next token, and fills the rest of its
budget with pieces of prefills. It knows sequences by name and rows by number; what a step is and what a token is drawn
from it has never seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from chiasm.errors import Unavailable

S = TypeVar("S", bound=Hashable)
D = TypeVar("D")


class Share(NamedTuple, Generic[S, D]):
    """A sequence's share of a step: its next `rows` rows, and how a token is drawn from the last; None draws none."""

    sequence: S
    rows: int
    draw: D | None


Outcome: TypeAlias = int | Exception | None
"""Of one share: the token drawn, None where none was to be drawn, or why that sequence failed."""

Compute: TypeAlias = Callable[[Sequence[Share[S, D]]], Awaitable[Sequence[Outcome]]]
"""Computes a step. Raises if it fails as a whole; then nothing of it counts as computed."""


@dataclass(slots=True)
class StepCounts:
    """Since the scheduler was made.

    Attributes:
        rows: computed in all steps together.
        batches: sequences of each of the last thousand steps.
    """

    steps: int = 0
    rows: int = 0
    batches: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Ask(Generic[S, D]):
    """What one sequence waits for."""

    sequence: S
    arrival: int
    rows: int
    draw: D | None
    done: asyncio.Future[int | None]


class Scheduler(Generic[S, D]):
    """The loop of one model. Used from one event loop.

    Args:
        max_rows: of one step, at most. It bounds how long a running answer waits for the prefill of another.

    Attributes:
        counts: of steps, for those who watch.
    """

    def __init__(self, compute: Compute[S, D], *, max_rows: int) -> None:
        self.counts = StepCounts()
        self.max_rows = max_rows
        self._compute = compute
        self._arrivals: dict[S, int] = {}  # by sequence, counted
        self._arrived = 0
        self._asks: dict[S, _Ask[S, D]] = {}
        self._runner: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Sequences that wait for a step or are in it."""
        return len(self._asks)

    async def step(self, sequence: S, rows: int, draw: D | None) -> int | None:
        """Waits until the sequence's next rows are computed: as many as asked for, or fewer.

        Args:
            rows: that can be computed, one at least.
            draw: how a token is drawn from the last of them.

        Returns the token, None if none was asked for or the rows were not all computed. Raises what the step raised
        for this sequence, Unavailable once the scheduler is closed.
        """
        assert rows > 0 and sequence not in self._asks, "a sequence waits for one step at a time"
        if self._closed:
            raise _ending()
        if sequence not in self._arrivals:
            self._arrived += 1
            self._arrivals[sequence] = self._arrived
        ask = _Ask(sequence, self._arrivals[sequence], rows, draw, asyncio.get_running_loop().create_future())
        self._asks[sequence] = ask
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        try:
            return await ask.done
        finally:
            if self._asks.get(sequence) is ask:
                del self._asks[sequence]

    def leave(self, sequence: S) -> None:
        """Forgets a sequence that will not come back."""
        self._arrivals.pop(sequence, None)

    async def close(self) -> None:
        """Fails whoever waits, and waits for the step that is running."""
        self._closed = True
        for ask in self._asks.values():
            if not ask.done.done():
                ask.done.set_exception(_ending())
        if self._runner is not None:
            await self._runner

    async def _run(self) -> None:
        while True:
            # Who has just been given a token asks for the next within one turn of the event loop. The step waits for
            # that turn: without it those who run together would part into groups that take turns.
            await asyncio.sleep(0)
            batch = self._pack()
            if not batch:
                return
            outcomes = await self._step(batch)
            for (ask, _), outcome in zip(batch, outcomes, strict=True):
                if ask.done.done():
                    continue  # its caller has left
                del self._asks[ask.sequence]
                if isinstance(outcome, Exception):
                    ask.done.set_exception(outcome)
                else:
                    ask.done.set_result(outcome)

    def _pack(self) -> list[tuple[_Ask[S, D], Share[S, D]]]:
        """The next step within the budget: single rows as they were asked for, so that everybody has a turn; then
        prefills by the arrival of their sequences, so that the first is done first."""
        asks = [ask for ask in self._asks.values() if not ask.done.done()]
        singles = [ask for ask in asks if ask.rows == 1]
        prefills = sorted((ask for ask in asks if ask.rows > 1), key=lambda ask: ask.arrival)
        batch = []
        left = self.max_rows
        for ask in (*singles, *prefills):
            if not left:
                break
            rows = min(ask.rows, left)
            left -= rows
            batch.append((ask, Share(ask.sequence, rows, ask.draw if rows == ask.rows else None)))
        return batch

    async def _step(self, batch: Sequence[tuple[_Ask[S, D], Share[S, D]]]) -> Sequence[Outcome]:
        """Computes a step. If it fails as a whole its sequences are tried alone: one sequence's fault is its own,
        whoever it ran with."""
        self.counts.steps += 1
        self.counts.batches = [*self.counts.batches[-999:], len(batch)]
        try:
            outcomes = await self._compute([share for _, share in batch])
        except Exception as error:
            if len(batch) == 1:
                return [error]
        else:
            self.counts.rows += sum(share.rows for _, share in batch)
            return outcomes
        alone: list[Outcome] = []
        for ask, share in batch:
            # Whoever has left meanwhile may hold nothing any more, and must not be given anything again.
            alone.extend([None] if ask.done.done() else await self._step([(ask, share)]))
        return alone


def _ending() -> Unavailable:
    return Unavailable("DRAINING", "the worker is ending", retry_after=1.0)
