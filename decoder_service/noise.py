"""Random numbers that depend on where they are used and on nothing else.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) makes numbers of a key and a
counter, without any state. The key is (seed, sequence); the counter is the index of the token and the place in the
vocabulary. So a stream that is continued elsewhere draws the same numbers, whoever it runs with and on every device.
It knows no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_LANES = 4
"""Numbers that are made of one count."""


def _signed(word: int) -> int:
    """The int64 of the same 64 bits: torch multiplies and adds no other whole numbers of that size."""
    return word - (1 << 64) if word >> 63 else word


_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_STEPS = _signed(0x9E3779B97F4A7C15), _signed(0xBB67AE8584CAA73B)


class Place(NamedTuple):
    """Where a token is drawn: the seed of its request, its sequence, and how many tokens are before it in the output.
    64 bits each."""

    seed: int
    sequence: int
    before: int


def gumbel(places: Sequence[Place], vocabulary: int, device: torch.device) -> Tensor:
    """(rows, vocabulary) float64 numbers of the standard Gumbel distribution, for every token at each place."""
    if device.type != "cpu":
        return gumbel_made(places, vocabulary, device)
    numbers = np.empty((len(places), vocabulary))
    for place, row in zip(places, numbers, strict=True):
        # numpy's own generator is ten times as fast as the whole numbers below, and makes the same.
        _stream(place).random(out=row)
        _gumbel(torch.from_numpy(row))  # while the row is in the cache
    return torch.from_numpy(numbers)


def gumbel_made(places: Sequence[Place], vocabulary: int, device: torch.device) -> Tensor:
    """As `gumbel`, made on the device itself."""
    blocks = torch.arange(-(-vocabulary // _LANES), device=device).unsqueeze(0)
    return _gumbel(_uniform(_words(places, blocks).flatten(1)[:, :vocabulary]))


def gumbel_at(places: Sequence[Place], tokens_rk: Tensor) -> Tensor:
    """(rows, k) float64: of the numbers that `gumbel` makes, those of the tokens (rows, k)."""
    lanes = (tokens_rk % _LANES).unsqueeze(-1)
    return _gumbel(_uniform(_words(places, tokens_rk // _LANES).gather(-1, lanes).squeeze(-1)))


def _words(places: Sequence[Place], blocks_rk: Tensor) -> Tensor:
    """(rows, k, 4) int64: the four words of each block, (rows, k) or (1, k), of four tokens."""
    words = np.array(places, dtype=np.uint64).view(np.int64)
    seeds, sequences, indices = torch.from_numpy(words).to(blocks_rk.device).unsqueeze(1).unbind(-1)
    # numpy counts up before it draws.
    zero = torch.zeros_like(seeds)
    return torch.stack(_philox((blocks_rk + 1, zero, indices, zero), (seeds, sequences)), -1)


def _uniform(words: Tensor) -> Tensor:
    """Numbers from 0 to 1 of the upper 53 bits of words, as numpy makes them."""
    return (words >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _stream(place: Place) -> np.random.Generator:
    key = np.array(place[:2], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, place.before, 0], dtype=np.uint64)))


def _gumbel(uniform: Tensor) -> Tensor:
    """Of numbers from 0 to 1, in place. A number that is 0 would be an infinite one, and is taken for the next."""
    return uniform.clamp_(min=2.0**-53).neg_().add_(1).log_().neg_().log_().neg_()


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four words of each counter. All are int64 and stand for words of 64 bits; sums and products wrap."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _STEPS[0], k1 + _STEPS[1]
    return c0, c1, c2, c3


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of a product."""
    upper, lower = a >> 32 & _WORD, a & _WORD
    b_upper, b_lower = b >> 32, b & _WORD
    first = upper * b_lower + (lower * b_lower >> 32 & _WORD)
    second = lower * b_upper + (first & _WORD)
    return upper * b_upper + (first >> 32 & _WORD) + (second >> 32 & _WORD), a * _signed(b)
