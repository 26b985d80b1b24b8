"""In which form a fleet ships its entries: chosen once, from what was measured, and kept where all workers find it.

Keys and values are larger than the states they are made of, and cost the decoder nothing more. Which is quicker is a
matter of two rates: bytes out of the store onto the decoder's device, and operations of the decoder that makes keys and
values itself. Forms that change numbers are never chosen here: that is for people to decide.

The choice is kept in the store itself, under a key and a tag of the workers' secret, so that it is taken over by
workers that start later, on whatever node. Any doubt about what is found there means that it is measured anew.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from typing import Final

import blake3
import torch
from torch.nn import functional as F

from chiasm.cache.entry import Contract, open_entry, seal
from chiasm.cache.form import Form
from chiasm.cache.framing import framed, u32
from chiasm.cache.sealed import EntryKey, Sealed
from chiasm.cache.store import EntryStore
from chiasm.errors import Overloaded
from chiasm.models.family import EntryShape

UNIT_TOKENS: Final = 145
"""Vision tokens that are projected at a time: a frame of 512 x 288 pixels at 32 x 32 a token, and its separator."""

PROBE_BYTES: Final = 4 << 20
"""Of an entry that is read to measure a link. What an entry costs whatever its size is then a small part of it."""

ROUNDS: Final = 5
"""Of which the median counts, after one that does not."""

Clock = Callable[[], float]
"""Seconds, monotonic."""

_MAGIC: Final = b"CHSH"
_RECORD: Final = struct.Struct("<4sHH32sdd")
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured.

    Attributes:
        link: bytes per second of entries, from the store to the decoder's device, verified.
        flops: floating-point operations per second of the decoder's projections.
    """

    link: float
    flops: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A form and what led to it.

    Attributes:
        measured: by this worker; otherwise by another one of the store.
    """

    form: Form
    rates: Rates
    measured: bool


def projection_flops(shape: EntryShape) -> int:
    """Operations that make keys and values of one visual token, in all layers."""
    return shape.layers * 2 * 2 * shape.hidden * shape.heads * shape.dim


def break_even(shape: EntryShape, dtype: torch.dtype, flops: float) -> float:
    """The bytes per second of a link above which keys and values arrive sooner than states can be projected.

    What they are larger by, in the time that projecting takes: k / link < s / link + t. Not above 0 where they are not
    larger.
    """
    kv, states = (shape.bytes_per_token(form, dtype) for form in (Form.CROSS_KV, Form.STATES))
    return (kv - states) * flops / projection_flops(shape)


def choose(shape: EntryShape, dtype: torch.dtype, rates: Rates) -> Form:
    """The form that is quicker. Keys and values where both are even: they leave the decoder free."""
    return Form.CROSS_KV if rates.link >= break_even(shape, dtype, rates.flops) else Form.STATES


async def agree(
    store: EntryStore,
    secret: bytes,
    shape: EntryShape,
    dtype: torch.dtype,
    measure: Callable[[], Awaitable[Rates]],
) -> Choice:
    """The choice that workers of this store have made for models of that shape, or else one that is made now and kept.

    Args:
        secret: of the workers.
        measure: raises Overloaded if the store takes nothing that could be read.

    Raises what `measure` raises.
    """
    known = await _found(store, secret, shape, dtype)
    if known is None:
        rates = await measure()
        known = await _found(store, secret, shape, dtype)  # who was quicker has chosen for all
    if known is not None:
        return known
    key, tag_key, subject = _names(secret, shape, dtype)
    choice = Choice(choose(shape, dtype, rates), rates, measured=True)
    header = _RECORD.pack(_MAGIC, _VERSION, choice.form, subject, rates.link, rates.flops)
    with suppress(Overloaded):  # then the next worker measures too
        await store.put(Sealed(header, memoryview(b""), blake3.blake3(header, key=tag_key).digest()), key, shared=True)
    return choice


async def _found(store: EntryStore, secret: bytes, shape: EntryShape, dtype: torch.dtype) -> Choice | None:
    """What is kept, if it can be believed."""
    key, tag_key, subject = _names(secret, shape, dtype)
    sealed = await store.get(key)
    if sealed is None:
        return None
    choice = _read(sealed, tag_key, subject)
    if choice is None or choose(shape, dtype, choice.rates) is not choice.form:
        await store.discard(key)
        return None
    return choice


def _read(sealed: Sealed, tag_key: bytes, subject: bytes) -> Choice | None:
    header = sealed.header
    if len(header) != _RECORD.size or sealed.payload.nbytes:
        return None
    if not compare_digest(blake3.blake3(header, key=tag_key).digest(), sealed.tag):
        return None
    magic, version, form, about, link, flops = _RECORD.unpack(header)
    if (magic, version, about) != (_MAGIC, _VERSION, subject) or form not in (Form.CROSS_KV, Form.STATES):
        return None
    if not all(math.isfinite(rate) and rate > 0 for rate in (link, flops)):
        return None
    return Choice(Form(form), Rates(link, flops), measured=False)


def _names(secret: bytes, shape: EntryShape, dtype: torch.dtype) -> tuple[EntryKey, bytes, bytes]:
    """Key of the record, secret of its tag, and what it is about: all of a model that the choice depends on."""
    numbers = (shape.layers, shape.heads, shape.dim, shape.hidden)
    subject = blake3.blake3(framed([str(dtype).encode(), *map(u32, numbers)])).digest()
    key = blake3.blake3(secret, derive_key_context="chiasm 2026 key of a choice of form").update(subject).digest()
    return key, blake3.blake3(secret, derive_key_context="chiasm 2026 tag of a choice of form").digest(), subject


# -- measuring ---------------------------------------------------------------------------------------------------------


async def measured(store: EntryStore, shape: EntryShape, *, device: torch.device, dtype: torch.dtype) -> Rates:
    """Both rates, as this worker has them. Takes the device for some passes over the projections' weights.

    Args:
        store: the one that entries come from: of one with tiers the far one, where entries are to cross nodes.

    Raises Overloaded if the store takes nothing that could be read.
    """
    link = await measured_link(store, device=device)
    return Rates(link, await asyncio.to_thread(measured_flops, shape, device=device, dtype=dtype))


async def measured_link(
    store: EntryStore, *, device: torch.device, nbytes: int = PROBE_BYTES, clock: Clock = time.perf_counter
) -> float:
    """Bytes per second of an entry that is read, verified and brought to a device."""
    key = secrets.token_bytes(32)  # two workers that measure at the same time leave each other's probes alone
    secret = secrets.token_bytes(32)
    contract = Contract(key, bytes(32), Form.STATES, torch.float32, (1, 1), (1, nbytes // 4))
    await store.put(seal(contract, torch.zeros(contract.shape), secret), key)

    def arrive(sealed: Sealed) -> None:
        opened = open_entry(sealed, contract, secret)
        assert not isinstance(opened, str), opened
        opened.to(device)
        _finish(device)

    taken = []
    try:
        for _ in range(ROUNDS + 1):
            began = clock()
            sealed = await store.get(key)
            if sealed is None:
                raise Overloaded("CACHE_FULL", "an entry that was put to be measured is gone", retry_after=1.0)
            await asyncio.to_thread(arrive, sealed)
            taken.append(clock() - began)
    finally:
        await store.discard(key)
    return nbytes / max(statistics.median(taken[1:]), 1e-9)


@torch.inference_mode()
def measured_flops(
    shape: EntryShape, *, device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter
) -> float:
    """Operations per second of projecting one unit. Each layer has weights of its own, as in the model: where they are
    larger than a cache, reading them is what takes the time."""
    states = torch.full((UNIT_TOKENS, shape.hidden), 0.01, device=device, dtype=dtype)
    width = 2 * shape.heads * shape.dim
    weights = [torch.full((width, shape.hidden), 0.01, device=device, dtype=dtype) for _ in range(shape.layers)]
    taken = []
    for _ in range(ROUNDS + 1):
        began = clock()
        for weight in weights:
            F.linear(states, weight)
        _finish(device)
        taken.append(clock() - began)
    return UNIT_TOKENS * projection_flops(shape) / max(statistics.median(taken[1:]), 1e-9)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
