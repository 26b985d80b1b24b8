"""What to do next about the workers of a pool: start one, wake one, let one drain. One step at a time, from what is
there now, so that it does not matter who began what: a controller that has just started reads the same from the same.

It knows numbers and states. Neither Ray nor a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["starting", "ready", "draining", "resting"]


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker as it stands.

    Attributes:
        current: whether it was started with the settings that the pool has now.
        running: calls that it works on.
    """

    name: str
    state: State
    current: bool
    running: int = 0


@dataclass(frozen=True, slots=True)
class Steps:
    """Names of those to be woken, to drain and then rest, to drain and then go, and whether one more is placed."""

    start: bool = False
    wake: str | None = None
    rest: str | None = None
    drain: str | None = None
    remove: tuple[str, ...] = ()


def step(there: Sequence[Standing], wanted: int) -> Steps:
    """The next step towards `wanted` workers that serve with the pool's settings.

    New settings come to one worker at a time, the new one first: there is one more than wanted until it is ready, and
    then one of the old ones drains. Of a pool that is to rest the last one keeps its place and lets its process end.
    """
    serving = [w for w in there if w.state in ("starting", "ready")]
    current = [w for w in serving if w.current]
    outdated = [w for w in serving if not w.current]
    resting = [w for w in there if w.state == "resting"]
    asleep = [w for w in resting if w.current]
    # A place is kept for as long as nobody serves: what rests beside others, or with old settings, goes.
    kept = asleep[:1] if wanted == 0 or not current else []
    remove = tuple(w.name for w in resting if w not in kept)

    if len(current) < wanted and len(serving) < wanted + bool(outdated):
        if kept:
            return Steps(wake=kept[0].name, remove=remove)
        return Steps(start=True, remove=remove)
    ready = [w for w in serving if w.state == "ready"]
    if len(serving) > wanted and (outdated or len(ready) > wanted or len(current) > wanted):
        # One that never became ready is no loss; of the others the least busy goes.
        order = sorted(serving, key=lambda w: (w.current, w.state == "ready", w.running))
        goes = order[0]
        if goes.state == "starting" or len(ready) > wanted:
            if wanted == 0 and goes.current and len(serving) == 1 and not kept:
                return Steps(rest=goes.name, remove=remove)
            return Steps(drain=goes.name, remove=remove)
    return Steps(remove=remove)
