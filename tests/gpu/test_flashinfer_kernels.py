"""FlashInfer's own kernels against sums written out in float64, step by step, on a CUDA device.

What is asked on a CPU of the plans is asked here of the kernels. They need the extra `gpu`. The first test of a type
and head size builds them, which takes a compiler (`nvcc`) and a minute or two.
"""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from chiasm.attention.choose import make
from chiasm.attention.flashinfer_backend import FlashInferAttention
from tests.attention.flashinfer_interpreter import Interpreter
from tests.attention.steps import Case, Rows, case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of values of order one: five steps of the type, whose products round the weights to it before they are summed."""


def hold(one: Case) -> None:
    """Holds both attentions of a step against the sums written out."""
    attention = make("flashinfer", one.pools, heads=one.q.shape[2])
    assert isinstance(attention, FlashInferAttention)
    own, crossed = one.run(attention)
    assert not own.isnan().any() and not crossed.isnan().any(), "NaN of the pool was read"
    tolerance = CLOSE[one.q.dtype]
    torch.testing.assert_close(own, one.own, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(crossed, one.crossed, rtol=tolerance, atol=tolerance)


HEADS = [(32, 8, 128), (6, 2, 64), (4, 4, 128), (16, 2, 64)]
"""Query heads, key heads, dimensions: an 8-billion model's, and groups of three, one and eight."""

MIXED = [
    Rows(0, [(0, 0), (0, 5), (0, 5), (0, 6), (0, 13)]),
    Rows(7, [(0, 13)]),
    Rows(15, [(0, 0)], video=2),
    Rows(3, [(5, 6), (5, 13), (0, 0)]),
    Rows(16, [(0, 4)], video=1),
    Rows(0, []),
]


@pytest.mark.parametrize(
    ("heads", "dtype"), [*((heads, torch.bfloat16) for heads in HEADS), (HEADS[0], torch.float16)], ids=str
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_mixed_step(heads: tuple[int, int, int], dtype: torch.dtype, page_size: int) -> None:
    q, kv, dim = heads
    hold(
        case(
            MIXED,
            {0: [5, 1, 7], 1: [4, 2]},
            heads=q,
            kv_heads=kv,
            head_dim=dim,
            page_size=page_size,
            device="cuda",
            dtype=dtype,
        )
    )


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_decode_step_alone_and_over_one_video(heads: tuple[int, int, int]) -> None:
    q, kv, dim = heads
    videos = {0: [145] * 8, 1: [5, 5]}
    sequences = [Rows(11 * at, [(0, 1160)]) for at in range(16)] + [Rows(300, [(0, 10)], video=1), Rows(2, [(0, 0)])]
    for some in (sequences, sequences[:1], sequences[-2:]):
        hold(case(some, videos, heads=q, kv_heads=kv, head_dim=dim, page_size=16, device="cuda", dtype=torch.bfloat16))


def test_frames_spread_over_a_long_prefill() -> None:
    """A part for each block, the rest run by run, and both merged."""
    units = [145] * 20
    seen = [(0, 145 * (row // 10)) for row in range(200)]
    hold(
        case(
            [Rows(0, seen), Rows(50, [(145, 290)] * 3)],
            {0: units},
            heads=32,
            kv_heads=8,
            head_dim=128,
            page_size=16,
            device="cuda",
            dtype=torch.bfloat16,
        )
    )


def test_eight_thousand_rows_before_and_eight_thousand_visual_tokens() -> None:
    sequences = [Rows(8191, [(0, 8120)]), Rows(8000, [(0, 145 * (1 + row)) for row in range(56)]), Rows(0, [(0, 0)])]
    hold(
        case(
            sequences,
            {0: [145] * 56},
            heads=32,
            kv_heads=8,
            head_dim=128,
            page_size=16,
            device="cuda",
            dtype=torch.bfloat16,
        )
    )


def test_the_interpreter_that_stands_in_elsewhere_takes_what_the_package_takes() -> None:
    flashinfer = importlib.import_module("flashinfer")
    stand_in = Interpreter()
    for name in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
        for method in ("__init__", "plan", "run"):
            mine = inspect.signature(getattr(getattr(stand_in, name).func, method)).parameters
            theirs = inspect.signature(getattr(getattr(flashinfer, name), method)).parameters
            assert mine.keys() - {"kernels", "rest"} <= theirs.keys(), (name, method)
    assert inspect.signature(stand_in.merge_state).parameters.keys() == (
        inspect.signature(flashinfer.merge_state).parameters.keys()
    )
