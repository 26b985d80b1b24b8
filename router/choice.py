"""Which of several workers that all could take a request takes it. Knows what workers say of themselves, no model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from blake3 import blake3

from router.fleet import DecoderWorker, EncoderWorker


def choose_encoder(found: Sequence[EncoderWorker], hint: bytes, rank: int = 0) -> EncoderWorker | None:
    """Rendezvous hashing: equal media meet where their entries are made, and a lost worker moves only its own.

    Args:
        hint: equal ones prefer the same encoder.
        rank: 0 for the one they prefer, 1 for the next, and so on, around.
    """
    by_weight = sorted(found, key=lambda worker: blake3(hint + worker.replica_id).digest(), reverse=True)
    return by_weight[rank % len(by_weight)] if by_weight else None


def choose_decoder(found: Sequence[DecoderWorker]) -> DecoderWorker | None:
    """Power of two choices: nearly as even as asking all of them, and no herd towards the emptiest."""
    return min(random.sample(found, min(2, len(found))), key=lambda worker: worker.busyness, default=None)
