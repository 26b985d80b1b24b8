"""Keys and values in 8 bits are off by no more than their entry states, whatever they were."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from chiasm.cache.form import Form
from chiasm.cache.quantised import FLOOR, SCHEMES, dequantise, quantise, scales_of

steady = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])

each_form = pytest.mark.parametrize("form", SCHEMES)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@st.composite
def entries(draw: st.DrawFn) -> Tensor:
    """(layers, 2, heads, tokens, width) of any floating type: ordinary numbers, zeros, denormals, whole channels that
    are constant, empty of digits, huge or tiny, and one token alone."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = (draw(st.integers(1, 2)), 2, draw(st.integers(1, 2)), draw(st.integers(1, 5)), 2 * draw(st.integers(1, 2)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = torch.from_numpy(rng.standard_normal(shape))
    for channel in itertools.product(range(shape[0]), range(2), range(shape[2]), range(shape[4])):
        layer, which, head, place = channel
        kind = draw(st.sampled_from(["ordinary", "zeros", "constant", "scaled", "one", "denormal", "outlier"]))
        numbers = made[layer, which, head, :, place]
        if kind == "zeros":
            numbers.zero_()
        elif kind == "constant":
            numbers.fill_(draw(st.floats(-60_000, 60_000)))
        elif kind == "scaled":
            numbers.mul_(2.0 ** draw(st.integers(-140, 12)))
        elif kind == "one":
            numbers[1:] = 0
        elif kind == "denormal":
            numbers.mul_(torch.finfo(dtype).tiny / 8)
        elif kind == "outlier":
            numbers[0] = 10_000
    return made.clamp(-60_000, 60_000).to(dtype)


@each_form
@steady
@given(entry=entries())
def test_no_number_is_off_by_more_than_is_stated(form: Form, entry: Tensor) -> None:
    """Of what the entry says, in float64; and of what a reader in float32 makes of it."""
    payload = quantise(entry, form)
    assert payload.dtype == torch.uint8
    assert payload.shape == (form.payload_bytes(tuple(entry.shape), entry.dtype.itemsize),)
    true = entry.double()
    allowed = SCHEMES[form].max_error * true.abs().amax(3, keepdim=True).clamp(min=FLOOR)
    numbers = payload[: entry.numel()].view(SCHEMES[form].dtype).view(entry.shape)
    scales = scales_of(payload, form, tuple(entry.shape)).unsqueeze(3)
    said = numbers.float().double() * scales.double()
    read = dequantise(payload, form, tuple(entry.shape), torch.float32)
    assert bool(((said - true).abs() <= allowed).all())
    assert bool(((read.double() - true).abs() <= allowed).all())


@each_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stated_error_is_not_far_from_the_largest(form: Form, dtype: torch.dtype) -> None:
    """It is a bound one can use, not any bound."""
    fine = torch.linspace(-1, 1, 100_001, dtype=torch.float64).view(1, 1, 1, -1, 1).expand(1, 2, 1, -1, 1)
    read = dequantise(quantise(fine, form), form, tuple(fine.shape), torch.float32)
    worst = (read.double() - fine).abs().max().item()
    assert 0.99 * SCHEMES[form].max_error < worst <= SCHEMES[form].max_error


@each_form
def test_zeros_and_the_largest_of_a_channel_come_back(form: Form) -> None:
    entry = torch.tensor([3.0, 0.0, -7.0, 0.0]).view(1, 1, 1, 4, 1).expand(1, 2, 1, 4, 1)
    read = dequantise(quantise(entry, form), form, (1, 2, 1, 4, 1), torch.float32)
    torch.testing.assert_close(read[..., 2, :], entry[..., 2, :], rtol=1e-6, atol=0)
    assert bool((read[..., [1, 3], :] == 0).all())


@each_form
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_a_scale(form: Form, wrong: float) -> None:
    entry = torch.ones(1, 2, 1, 3, 2)
    entry[0, 1, 0, 2, 1] = wrong
    scales = scales_of(quantise(entry, form), form, tuple(entry.shape))
    assert torch.isfinite(scales).logical_not().nonzero().tolist() == [[0, 1, 0, 1]]


def test_every_number_of_eight_bits_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    known = numbers.isfinite()
    payload = torch.cat([codes, torch.ones(2, dtype=torch.float32).view(torch.uint8)])
    read = dequantise(payload, Form.CROSS_KV_FP8, (1, 2, 1, 128, 1), torch.float32).flatten()
    assert torch.equal(read[known], numbers[known])
    assert known.sum() == 254


def test_scales_that_lie_askew_in_memory_are_read_too() -> None:
    entry = torch.randn(1, 2, 1, 3, 2, generator=torch.Generator().manual_seed(0))
    payload = quantise(entry, Form.CROSS_KV_INT8)
    askew = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]
    assert askew.data_ptr() % 4
    shape = tuple(entry.shape)
    assert torch.equal(
        dequantise(askew, Form.CROSS_KV_INT8, shape, torch.float32),
        dequantise(payload, Form.CROSS_KV_INT8, shape, torch.float32),
    )
