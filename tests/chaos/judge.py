"""The judge of a chaos run: every request ends once and in time, with the answer of a quiet system or with an error
that may be. Knows answers, and no fault."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from chiasm import AsyncClient, Finished, Started, Token
from chiasm.client import Content, Event, Generation
from chiasm.errors import ChiasmError, StatusError
from tests.chaos.asking import MAX_TOKENS, MODEL, Handles, Question, Questions, Truth

DEADLINE = 60.0
"""Seconds that a request may take. Far more than anything needs here: one that meets it has hung."""

GRACE = 5.0

CANCELLED = 0.15
"""Share of the requests that their client leaves somewhere."""


@dataclass
class Verdict:
    """What became of the requests.

    Attributes:
        errors: allowed ones, by reason.
        errors_after: the same, by the fault that was the last to begin when they came.
        wrong: everything that may not be, in words.
    """

    asked: int = 0
    right: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    errors_after: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    meanwhile: str = "none"
    wrong: list[str] = field(default_factory=list)

    def says(self, question: Question, what: str) -> None:
        self.wrong.append(f"{question.name} ({question.text}): {what}")


class Judge:
    """Asks, and holds what comes against the truth.

    Args:
        allowed: reasons of errors with which a request may end. Each must say that it may be sent again.
    """

    def __init__(self, client: AsyncClient, truth: Truth, allowed: Collection[str], seed: int) -> None:
        self._client = client
        self._truth = truth
        self._allowed = allowed
        self._handles = Handles(client)
        self._questions = Questions(seed)
        self._draw = random.Random(seed + 1)
        self.verdict = Verdict()

    async def ask_on(self, stop: asyncio.Event) -> None:
        """Asks one question after another."""
        while not stop.is_set():
            await self.ask(self._questions.next(), leaving=self._draw.random() < CANCELLED)

    async def ask(self, question: Question, *, leaving: bool = False) -> None:
        truth = await self._truth.of(question)
        content = await self._handles.content(question)
        self.verdict.asked += 1
        started = time.monotonic()
        events: list[Event] = []
        try:
            async with asyncio.timeout(DEADLINE + GRACE):
                left = await self._follow(content, events, self._place(truth) if leaving else None)
        except ChiasmError as error:
            if self._may_be(error) and not any(isinstance(event, Finished) for event in events):
                self.verdict.errors[error.reason] += 1
                self.verdict.errors_after[self.verdict.meanwhile][error.reason] += 1
                self._check_part(question, events, truth)
            else:
                seconds = time.monotonic() - started
                self.verdict.says(question, f"{error!r} after {seconds:.1f} s and {len(events)} events")
        except TimeoutError:
            self.verdict.says(question, f"no end after {DEADLINE + GRACE} s")
        else:
            if left:
                self.verdict.left += 1
                self._check_part(question, events, truth)
            elif self._check_whole(question, events, truth):
                self.verdict.right += 1

    def _may_be(self, error: ChiasmError) -> bool:
        """A header that was written over twice reads as an entry of another kind: sending again mends no such thing."""
        again = error.retryable or (isinstance(error, StatusError) and "field" in error.facts)
        return error.reason in self._allowed and again

    def _place(self, truth: Generation) -> float | int:
        """Where a client leaves: after some events, or after some seconds."""
        if self._draw.random() < 0.5:
            return self._draw.randint(1, 2 + len(truth.ids))
        return self._draw.random() * 0.3

    async def _follow(self, content: Content, events: list[Event], leaving: float | int | None) -> bool:
        """Reads an answer. Returns whether it was left before its end."""
        seconds = leaving if isinstance(leaving, float) else None
        count = leaving if isinstance(leaving, int) else None
        try:
            async with asyncio.timeout(seconds) as limit:
                async with self._client.stream(MODEL, content, max_tokens=MAX_TOKENS, timeout=DEADLINE) as stream:
                    async for event in stream:
                        events.append(event)
                        if len(events) == count and not isinstance(event, Finished):
                            return True
        except TimeoutError:
            if not limit.expired():
                raise
            return not (events and isinstance(events[-1], Finished))
        return False

    def _check_whole(self, question: Question, events: list[Event], truth: Generation) -> bool:
        ends = [place for place, event in enumerate(events, 1) if isinstance(event, Finished)]
        if ends != [len(events)]:
            self.verdict.says(question, f"{len(events)} events, ends at {ends}")
            return False
        if _ids(events) != truth.ids:
            self.verdict.says(question, f"ids {_ids(events)} instead of {truth.ids} ({truth.text})")
            return False
        return self._check_part(question, events, truth)

    def _check_part(self, question: Question, events: list[Event], truth: Generation) -> bool:
        """What was told before the end is the beginning of the right answer."""
        ids = _ids(events)
        frames = [event.frames for event in events if isinstance(event, Started)]
        if ids != truth.ids[: len(ids)] or frames not in ([], [truth.frames]):
            self.verdict.says(question, f"began with {ids} instead of {truth.ids} ({truth.text}), frames {frames}")
            return False
        return True


def _ids(events: list[Event]) -> tuple[int, ...]:
    return tuple(token for event in events if isinstance(event, Token) for token in event.ids)
