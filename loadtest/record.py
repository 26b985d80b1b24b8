"""One request as its caller saw it, in plain numbers, so that it crosses processes and files as it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Outcome: TypeAlias = Literal["completed", "refused", "failed"]
"""`refused`: RESOURCE_EXHAUSTED, the word of a server that has enough to do. Every other error is `failed`."""


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds.

    Attributes:
        number: counts the requests of a step, from 0.
        sent: when it was handed to the client, of the wall clock.
        late: how long after it was due. In an open loop its times count from when it was due; in a closed one it is 0.
        whole: from `sent` to its end, whatever that was.
        first_token: from `sent` to the first event with tokens; None where none came.
        first_visible: from `sent` to when the first frame was seen.
        gaps: between consecutive events with tokens.
        tokens, prompt_tokens, visual_tokens: counts.
        units, units_cached: of its media.
        stages: what the server says that each stage took.
        right: whether the answer was the right one; None where nobody knows.
        reason: why it was refused or failed.
        text: an answer that was not right.
    """

    number: int
    sent: float
    outcome: Outcome = "failed"
    late: float = 0.0
    whole: float = 0.0
    first_token: float | None = None
    first_visible: float | None = None
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    visual_tokens: int = 0
    units: int = 0
    units_cached: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    right: bool | None = None
    reason: str = ""
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def wrong(self) -> bool:
        return self.right is False

    @property
    def ended(self) -> float:
        return self.sent + self.whole

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.late + self.first_token

    @property
    def e2el(self) -> float:
        return self.late + self.whole

    @property
    def tpot(self) -> float:
        """Seconds a token after the first, as vLLM counts them: 0 for an answer of one."""
        if self.first_token is None or self.tokens <= 1:
            return 0.0
        return (self.whole - self.first_token) / (self.tokens - 1)

    def milliseconds(self, name: str) -> float | None:
        """What a limit of that name is held against: its own time, or its longest gap. None where there is none."""
        seconds = {
            "ttft_ms": self.ttft,
            "tpot_ms": self.tpot,
            "itl_ms": max(self.gaps, default=0.0),
            "e2el_ms": self.e2el,
        }[name]
        return None if seconds is None else 1000 * seconds
