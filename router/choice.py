"""Which of several workers that all could take a request takes it. Knows what workers say of themselves, no model.

Encoders: equal media meet at one encoder, unless it has much more to do than the others ("Consistent Hashing with
Bounded Loads", Mirrokni, Thorup and Zadimoghaddam, 2018, over rendezvous hashing). Decoders: a timeline goes where one
that has much in common with it went, within the same bound, and else to the less busy of two.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from blake3 import blake3

from chiasm.rpc.v1 import router_pb2 as rpb
from router.fleet import DecoderWorker, EncoderWorker, Worker

BOUND: Final = 1.25
"""How many times the average a worker may have to do and still be preferred."""

REMEMBERED: Final = 8192
"""Keys of timelines whose decoder is remembered."""

TEXT_CHUNK: Final = 512
"""Bytes of text with which timelines begin that have much text in common. Less is not worth a busier decoder."""

MEDIUM_BYTES: Final = 64 << 10
"""Of a medium, by whose beginning and length it is told from others."""


def choose_encoder(found: Sequence[EncoderWorker], hint: bytes, rank: int = 0) -> EncoderWorker | None:
    """The first in an order of their own that has not too much to do; a lost worker moves only its own media.

    Media that are being encoded somewhere for this router go there, however busy it is: it encodes a unit once.

    Args:
        hint: equal ones have the same order.
        rank: 0 for the first, 1 for the next, and so on, around. Shares of one medium are for as many encoders, busy
            or not.
    """
    by_weight = sorted(found, key=lambda worker: blake3(hint + worker.replica_id).digest(), reverse=True)
    if not by_weight:
        return None
    turned = by_weight[rank % len(by_weight) :] + by_weight[: rank % len(by_weight)]
    ready = [worker for worker in turned if not worker.full] or turned
    if rank:
        return ready[0]
    making = [worker for worker in ready if worker.hints[hint]]
    within = [worker for worker in ready if not _busy(worker, ready)]
    return (making or within or ready)[0]


def _busy(worker: EncoderWorker, among: Sequence[EncoderWorker]) -> bool:
    """It has too much to do: media of this router, or patches as it says itself, which are of all routers."""
    media = [len(one.hints) for one in among]
    patches = [one.cost for one in among]
    one_medium = sum(patches) / max(sum(one.load for one in among), 1)
    return not (_within(len(worker.hints), media, 1) and _within(worker.cost, patches, one_medium))


def _within(load: float, loads: Sequence[float], one: float) -> bool:
    """Whether a load is at most `BOUND` times the average and one more."""
    return load <= BOUND * sum(loads) / len(loads) + one


class Affinity:
    """Which decoder served a key last. It forgets what was not asked for longest."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._replicas: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, keys: Sequence[bytes], found: Sequence[DecoderWorker]) -> DecoderWorker | None:
        """The one of `found` that served the first key that any of them served."""
        by_replica = {worker.replica_id: worker for worker in found}
        return next((by_replica[r] for key in keys if (r := self._replicas.get(key)) in by_replica), None)

    def note(self, keys: Sequence[bytes], worker: DecoderWorker) -> None:
        for key in keys:
            self._replicas[key] = worker.replica_id
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._remembered:
            self._replicas.popitem(last=False)


def choose_decoder(
    found: Sequence[DecoderWorker], keys: Sequence[bytes] = (), affinity: Affinity | None = None
) -> DecoderWorker | None:
    """The one that served the same keys last, unless it has too much to do; else power of two choices: nearly as even
    as asking all of them, and no herd towards the emptiest. `affinity` notes the choice."""
    ready = [worker for worker in found if not worker.full] or found
    chosen = None if affinity is None else affinity.find(keys, ready)
    if chosen is None or not _within(chosen.busyness, [worker.busyness for worker in ready], 1):
        chosen = min(random.sample(ready, min(2, len(ready))), key=_pressure, default=None)
    if affinity is not None and chosen is not None:
        affinity.note(keys, chosen)
    return chosen


def _pressure(worker: Worker[Any]) -> tuple[int, int]:
    return worker.busyness, worker.cost


def affinity_keys(
    request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest, tenant_root: bytes
) -> list[bytes]:
    """What a timeline may have in common with others of its tenant, the largest part first: its media, then the text
    that it begins with."""
    keys = []
    if request.media:
        media = blake3(tenant_root)
        for medium in request.media:
            for data in (medium.handle.encode(), medium.data, *(frame.data for frame in medium.frames.frames[:1])):
                media.update(len(data).to_bytes(8, "big") + data[:MEDIUM_BYTES])
            media.update(len(medium.frames.frames).to_bytes(8, "big"))
        keys.append(media.digest())
    text = _first_text(request)
    if len(text) == TEXT_CHUNK:
        keys.append(blake3(tenant_root + text).digest())
    return keys


def _first_text(request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest) -> bytes:
    """At most `TEXT_CHUNK` bytes, up to the first medium."""
    text = b""
    turns = request.prompt.conversation.turns
    for part in [*request.prompt.plain.parts, *(part for turn in turns[:8] for part in turn.parts)][:64]:
        if part.WhichOneof("content") == "slot" or len(text) >= TEXT_CHUNK:
            break
        text += part.text[:TEXT_CHUNK].encode("utf-8", "replace")
    return text[:TEXT_CHUNK]
