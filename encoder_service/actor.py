"""The encoder as a Ray actor. Light: torch is loaded by the process that it hosts."""

from __future__ import annotations

from chiasm.hosted import Hosted


class EncoderActor(Hosted):
    """`python -m encoder_service`, as `chiasm.hosted` runs it."""

    module = "encoder_service"
