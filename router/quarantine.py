"""What ended the workers that computed it: tried once more, apart from everything else, then refused for a while.

A worker that dies takes all that ran on it along, and does not say whose fault it was. So whatever ran there is a
*suspect*: its next trial waits until nothing else of this router is tried on that worker, and nothing else begins
beside it. Who gets through is a suspect no more. A worker that is lost while a suspect is alone on it convicts the
suspect: nothing has then been tried more than twice, and nobody is refused for what was beside him.

Who got through, and loses the worker later, in the middle of an answer, goes on elsewhere beside others: most often
the worker was to blame, and many answers are lost with one. That it was *hurt* is remembered until it gets through
again. If it does not, and ends the next worker where it was alone, it is convicted: its second try was its last too.

It knows names and clocks: neither media nor prompts, and workers only as places. Other routers learn by their own two
tries.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from blake3 import blake3
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chiasm.errors import InvalidRequest

POISON: Final = "POISON_INPUT"

SECONDS: Final = 600.0
"""How long something is remembered."""

MOST: Final = 4096
"""Names remembered of each kind; the oldest is forgotten first."""

PATIENCE: Final = 5.0
"""Seconds that a trial waits for another one. What is tried may itself wait for what waits here, as a medium does for
room that a sibling is to make: then they go on side by side, and a loss says nothing of either."""

TRIES: Final = 2


def name(tenant_root: bytes, *parts: bytes) -> bytes:
    """What something of one tenant is called here. The tenant's root is a secret and kept nowhere.

    Args:
        tenant_root: 32 bytes.
        parts: what it is made of, for example a digest.
    """
    digest = blake3(key=tenant_root)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class Trial:
    """Something that a worker is to compute. Begun once, ended once or more: what came first counts.

    Attributes:
        begun: it is on its worker.
        apart: nothing else was on the worker since it began.
    """

    def __init__(self, quarantine: Quarantine, subject: bytes, place: object, item: str | None) -> None:
        self.subject = subject
        self.place = place
        self.begun = False
        self.apart = False
        self._survived = False
        self._quarantine = quarantine
        self._item = item

    @property
    def suspected(self) -> bool:
        return self._quarantine.suspected(self.subject)

    async def begin(self) -> bool:
        """Returns when it may be given to its worker: whether it had to wait. Raises as `Quarantine.check`, also when
        the subject was convicted meanwhile. What is cancelled here has not begun."""
        waited = await self._quarantine.enter(self)
        try:
            self._quarantine.check(self.subject, self._item)
        except InvalidRequest:
            self.end()
            raise
        return waited

    def refused(self) -> InvalidRequest:
        """What a convict is told."""
        return self._quarantine.refused(self._item)

    def passed(self) -> None:
        """The worker has survived it."""
        if self.begun:
            self._survived = True
            self._quarantine.acquit(self)
        self.end()

    def lost(self) -> bool:
        """The worker was lost. Returns whether that convicts the subject, which it never does after `passed`."""
        convicted = False
        if self._survived:
            self._quarantine.hurt(self)
        elif self.begun:
            convicted = self._quarantine.accuse(self)
        self.end()
        return convicted

    def end(self) -> None:
        """Nothing is known of it: what was a suspect stays one."""
        self.apart = False
        self._quarantine.leave(self)


class Quarantine(Collector):
    """Suspects and convicts of one router. Used from one event loop.

    Args:
        seconds: how long either is remembered.
        most, patience: as the constants of these names.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        seconds: float = SECONDS,
        most: int = MOST,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._patience = patience
        self._suspects = _Book(most, clock)
        self._hurt = _Book(most, clock)
        self._convicts = _Book(most, clock)
        self._trials: list[Trial] = []  # that run or wait, in the order in which they came
        self._changed = asyncio.Event()
        self.convictions = 0

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "chiasm_quarantined", "Inputs that ended two workers by themselves.", value=self.convictions
        )
        yield GaugeMetricFamily("chiasm_suspects", "Inputs that were on a worker when it was lost.", self.suspects)

    @property
    def suspects(self) -> int:
        """How many there are now."""
        return len(self._suspects)

    def suspected(self, subject: bytes) -> bool:
        return subject in self._suspects

    def check(self, subject: bytes, item: str | None = None) -> None:
        """Raises `refused` for a convict."""
        if subject in self._convicts:
            raise self.refused(item)

    def refused(self, item: str | None = None) -> InvalidRequest:
        """What a convict is told.

        Args:
            item: the part of the request that it is.
        """
        return InvalidRequest(
            POISON,
            f"computing this ended {TRIES} workers; it is not tried for {self._seconds:g} s",
            item=item,
            facts={"attempts": TRIES, "seconds": self._seconds},
        )

    def trial(self, subject: bytes, place: object, item: str | None = None) -> Trial:
        """Something that is to be given to a worker.

        Args:
            place: where the worker is. A restart of it is at the same place.
            item: as of `refused`.
        """
        return Trial(self, subject, place, item)

    # -- for trials --------------------------------------------------------------------------------------------------

    async def enter(self, trial: Trial) -> bool:
        """Whether it had to wait."""
        self._trials.append(trial)
        if waits := self._in_the_way(trial):
            await self._wait(trial)
        others = [other for other in self._trials if other.begun and other.place is trial.place]
        for other in others:
            other.apart = False
        trial.begun, trial.apart = True, not others
        return waits

    async def _wait(self, trial: Trial) -> None:
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    while self._in_the_way(trial):
                        await self._changed.wait()
        except BaseException:
            self.leave(trial)
            raise

    def leave(self, trial: Trial) -> None:
        if trial in self._trials:
            self._trials.remove(trial)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def acquit(self, trial: Trial) -> None:
        self._suspects.forget(trial.subject)
        self._hurt.forget(trial.subject)

    def hurt(self, trial: Trial) -> None:
        self._hurt.note(trial.subject, self._seconds)

    def accuse(self, trial: Trial) -> bool:
        subject = trial.subject
        if not (trial.apart and (self.suspected(subject) or subject in self._hurt)):
            self._suspects.note(subject, self._seconds)
            return False
        self._suspects.forget(subject)
        self._hurt.forget(subject)
        self.convictions += subject not in self._convicts
        self._convicts.note(subject, self._seconds)
        return True

    def _in_the_way(self, trial: Trial) -> bool:
        suspect = self.suspected(trial.subject)
        before = True  # whether the other came first
        for other in self._trials:
            if other is trial:
                before = False
            elif suspect and other.subject == trial.subject and (before or other.begun):
                return True  # one subject is tried at one place at a time, or it would end them all
            elif other.place is trial.place and (
                (other.begun and (suspect or self.suspected(other.subject)))
                or (before and self.suspected(other.subject))
            ):
                return True
        return False


class _Book:
    """Names, each until a time."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, subject: bytes) -> bool:
        return self._until.get(subject, 0.0) > self._clock()

    def __len__(self) -> int:
        self._sweep()
        return len(self._until)

    def note(self, subject: bytes, seconds: float) -> None:
        self._until.pop(subject, None)
        self._until[subject] = self._clock() + seconds
        self._sweep()
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def forget(self, subject: bytes) -> None:
        self._until.pop(subject, None)

    def _sweep(self) -> None:
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
