"""How a bug is planted: a function takes the place of another, says each time it is reached, and is taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Hurt: TypeAlias = Literal["nothing", "bytes", "decoders", "routers", "last words", "responses"]
"""What is done to the system while it is asked: bytes of entries are changed, decoders or routers are lost, decoders
with their last word, or responses on their way to the client."""


class Planted:
    """A bug in this process.

    Args:
        reached: called when it is reached for the first time.
    """

    def __init__(self, reached: Callable[[], None] = lambda: None) -> None:
        self._hits = 0
        self._reached = reached
        self._undo: list[Callable[[], None]] = []

    @property
    def hits(self) -> int:
        """How often it was reached."""
        return self._hits

    @hits.setter
    def hits(self, hits: int) -> None:
        first, self._hits = hits and not self._hits, hits
        if first:
            self._reached()

    def hit(self) -> None:
        self.hits += 1

    def patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Puts what `make` makes of an attribute of a class or a module in its place."""
        own = name in vars(owner)
        before = vars(owner)[name] if own else getattr(owner, name)
        setattr(owner, name, make(before))
        self._undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    def dig_out(self) -> None:
        while self._undo:
            self._undo.pop()()


@dataclass(frozen=True, slots=True)
class Plant:
    """One bug.

    Attributes:
        role: whose process it is planted into.
        says: what is wrong, in a few words.
        hurt: what else it takes to be seen.
        settings: of the laboratory, where it is not the usual one.
    """

    name: str
    role: str
    says: str
    plant: Callable[[Planted], None]
    hurt: Hurt = "nothing"
    settings: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def planted(plant: Plant | None) -> Iterator[Planted]:
    """The bug is there while the block runs; None for none."""
    bug = Planted()
    try:
        if plant is not None:
            plant.plant(bug)
        yield bug
    finally:
        bug.dig_out()


class Garden:
    """The bugs of one place, gathered by a decorator: the name is that of the function, with blanks."""

    def __init__(self, role: str) -> None:
        self.plants: list[Plant] = []
        self._role = role

    def __call__(
        self, says: str, *, hurt: Hurt = "nothing", **settings: Any
    ) -> Callable[[Callable[[Planted], None]], Callable[[Planted], None]]:
        def add(plant: Callable[[Planted], None]) -> Callable[[Planted], None]:
            name = plant.__name__.strip("_").replace("_", "-")
            self.plants.append(Plant(name, self._role, says, plant, hurt, settings))
            return plant

        return add
