"""A fleet of fixed addresses and DNS names."""

from __future__ import annotations

from collections.abc import Sequence

from router.member_fleet import BEAT, MemberFleet
from router.membership import Named


class StaticFleet(MemberFleet):
    """A fleet of targets as a channel takes them; each address of a `dns:///HOST:PORT` is a worker of its own, looked
    up again at every beat. The rest is as of `MemberFleet`."""

    def __init__(
        self, encoders: Sequence[str], decoders: Sequence[str], *, patience: float = 30.0, beat: float = BEAT
    ) -> None:
        super().__init__(Named(encoders, decoders, beat=beat), patience=patience, beat=beat)
