"""The decoder as a Ray actor. Light: torch is loaded by the process that it hosts."""

from __future__ import annotations

from chiasm.hosted import Hosted


class DecoderActor(Hosted):
    """`python -m decoder_service`, as `chiasm.hosted` runs it."""

    module = "decoder_service"
