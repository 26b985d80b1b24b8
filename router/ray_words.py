"""What the controller of a fleet over Ray tells its router: one line of JSON, at every beat and when it changes.

The router takes what is whole and lets everything else pass: a library may print, a line may be cut, and the next beat
says all of it again. Knows neither processes nor Ray.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, Self

from router.membership import Hopeless, Role


@dataclass(frozen=True, slots=True)
class Told:
    """Where workers are.

    Attributes:
        targets: what a channel takes, by role. None from a controller that lives and knows nothing yet.
        asleep: models whose encoders rest.
        hopeless: of pools that never had a worker ready, and whose workers died again and again.
    """

    targets: dict[Role, list[str]] | None = None
    asleep: frozenset[str] = frozenset()
    hopeless: tuple[Hopeless, ...] = field(default=())

    def line(self) -> str:
        said: dict[str, Any] = {}
        if self.targets is not None:
            said = {"targets": self.targets, "asleep": sorted(self.asleep), "hopeless": self.hopeless}
        return json.dumps(said)

    @classmethod
    def read(cls, line: bytes) -> Self | None:
        """What a line says. None for one that says nothing of that."""
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if said == {}:
            return cls()
        match said:
            case {"targets": {"encoder": encoders, "decoder": decoders}, "asleep": asleep, "hopeless": hopeless}:
                pass
            case _:
                return None
        if not all(_words(names) for names in (encoders, decoders, asleep)) or not isinstance(hopeless, list):
            return None
        if not all(_words(why) and len(why) == _PARTS for why in hopeless):
            return None
        targets: dict[Role, list[str]] = {"encoder": encoders, "decoder": decoders}
        return cls(targets, frozenset(asleep), tuple(Hopeless(*why) for why in hopeless))


_PARTS: Final = len(Hopeless._fields)


def _words(said: object) -> bool:
    return isinstance(said, list) and all(isinstance(word, str) for word in said)
