"""Keys and values in 8 bits: each number is a small one times the scale of its channel.

A channel is one layer, K or V, one head and one place of its width; its scale is taken over the tokens of a unit, so
that a unit depends on nothing but itself. The payload is the numbers, then the scales in float32, as one row of bytes.

**The error.** Let M be the largest magnitude of a channel, at least `FLOOR`, and s = M / L the scale, where L is the
largest number of the type. x / s lies in [-L, L] and is rounded to the nearest number of the type. Integers are 1
apart: the error is at most s / 2 = M / 254. Numbers of e4m3 are at most 32 apart (between 256 and 448): the error is
at most 16 s = M * 16 / 448. To that, float32 adds the rounding of x, s, of the quotient and of the product on reading:
four times 2**-24 of M. The bound is on what the entry says; that it is then rounded to the type of the reader's pool
is no different from any other number there.

Below `FLOOR` the bound is on `FLOOR` in place of M: the scales would have no digits left.

Shape suffixes: L layers, K kv heads, S vision tokens, D width of a head.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from chiasm.cache.form import Form

FLOOR: Final = 2.0**-110
"""The least magnitude that a channel is scaled by. Its scales are normal float32 numbers in either type."""

_ROUNDINGS: Final = 4 * 2.0**-24


class Scheme(NamedTuple):
    """A way to store numbers in 8 bits.

    Attributes:
        dtype: of the numbers.
        largest: of the numbers.
        max_error: of any number, relative to the largest magnitude of its channel.
    """

    dtype: torch.dtype
    largest: float
    max_error: float


SCHEMES: Final = {
    Form.CROSS_KV_INT8: Scheme(torch.int8, 127.0, 1 / 254 + _ROUNDINGS),
    Form.CROSS_KV_FP8: Scheme(torch.float8_e4m3fn, 448.0, 16 / 448 + _ROUNDINGS),
}


def quantise(entry: Tensor, form: Form) -> Tensor:
    """(L, K|V, K, S, D) of any floating type to the bytes of a payload, uint8 in one row, on the same device.

    What is not finite makes its scale not finite (`scales_of`), so an entry can be judged by its scales.
    """
    scheme, shape = SCHEMES[form], tuple(entry.shape)
    count = entry.numel()
    payload = torch.empty(form.payload_bytes(shape, 1), dtype=torch.uint8, device=entry.device)
    numbers = _blocks(payload[:count].view(scheme.dtype).view(shape))
    scales = torch.empty((*numbers.shape[:3], 1, shape[4]), dtype=torch.float32, device=entry.device)
    scratch = torch.empty(numbers.shape[1:], dtype=torch.float32, device=entry.device)
    for number, scale, given in zip(numbers, scales, _blocks(entry), strict=True):
        scratch.copy_(given)
        torch.maximum(scratch.amax(2, keepdim=True), scratch.amin(2, keepdim=True).neg_(), out=scale)
        scratch.div_(scale.clamp_(min=FLOOR).div_(scheme.largest))
        number.copy_(scratch.round_() if scheme.dtype == torch.int8 else scratch)
    payload[count:] = scales.view(torch.uint8).flatten()
    return payload


def dequantise(payload: Tensor, form: Form, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes of a payload to (L, K|V, K, S, D) = `shape` of a floating type, on the same device."""
    numbers = _blocks(payload[: math.prod(shape)].view(SCHEMES[form].dtype).view(shape))
    scales = _blocks(scales_of(payload, form, shape).unsqueeze(3))
    if form is Form.CROSS_KV_FP8:
        scales = scales * 256
    entry = torch.empty(shape, dtype=dtype, device=payload.device)
    scratch = torch.empty(numbers.shape[1:], dtype=torch.float32, device=payload.device)
    for made, number, scale in zip(_blocks(entry), numbers, scales, strict=True):
        scratch.copy_(_as_float16(number) if form is Form.CROSS_KV_FP8 else number)
        made.copy_(scratch.mul_(scale))
    return entry


def _blocks(tensor: Tensor) -> Tensor:
    """(L, K|V, K, S, D) as (blocks, parts, K, S, D), to go over one by one.

    On a CPU keys or values of one layer at a time, which stay in its cache: that takes half as long. Elsewhere all at
    once, because every call costs.
    """
    parts = tensor.flatten(0, 1)
    return parts.unsqueeze(1) if tensor.device.type == "cpu" else parts.unsqueeze(0)


def scales_of(payload: Tensor, form: Form, shape: tuple[int, ...]) -> Tensor:
    """(L, K|V, K, D) scales of a payload, as a view of it, or as a copy where they do not lie as float32 numbers do."""
    behind = payload[math.prod(shape) :]
    aligned = behind if behind.storage_offset() % 4 == 0 and behind.data_ptr() % 4 == 0 else behind.clone()
    return aligned.view(torch.float32).view(form.scales(shape))


def _as_float16(numbers: Tensor) -> Tensor:
    """e4m3 numbers as float16, each divided by 256, which is exact.

    Sign, exponent and mantissa only have to move to where float16 has them. torch's own conversion takes five times as
    long on a CPU. The two codes of no number, which nothing here writes, become 480.
    """
    bits = numbers.view(torch.int8).to(torch.int16)
    bits <<= 7
    bits &= ~(1 << 14)  # the sign, extended by the cast, lies there once too often
    return bits.view(torch.float16)
