"""Tokens drawn for a batch are those that a plain reference draws for each row alone, in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chiasm.errors import ServerError
from decoder_service.masks import Bits, banned, banned_on
from decoder_service.penalties import Bias, Penalties, Seen
from decoder_service.sampler import MOST_LOGPROBS, Draw, Drawing, Drawn, draw, draw_rows
from decoder_service.truncation import Truncation

Floats = npt.NDArray[np.float64]


def gumbel(seed: int, sequence: int, index: int, size: int) -> Floats:
    """The numbers of one place, as numpy makes them."""
    key = np.array([seed, sequence], dtype=np.uint64)
    counter = np.array([0, 0, index, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).gumbel(size=size)


def scaled(logits_v: Tensor, one: Draw) -> Floats:
    """The logits of one row after bans, biases, penalties and temperature, token by token."""
    logits = logits_v.double().numpy().copy()
    drawing = one.drawing
    if one.guide is not None:
        one.guide(bits := np.full(-(-len(logits) // 8), 0xAA, dtype=np.uint8))
        for token in range(len(logits)):
            if not bits[token // 8] >> token % 8 & 1:
                logits[token] = -np.inf
    logits[one.banned] = -np.inf
    for token, value in zip(*drawing.bias, strict=True):
        logits[token] += value
    for token, count in zip(one.seen.ids, one.seen.counts, strict=True):
        repetition = drawing.penalties.repetition
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        logits[token] -= drawing.penalties.frequency * count
        logits[token] -= drawing.penalties.presence if count else 0.0
    return np.asarray(logits / (drawing.temperature or 1.0))


def kept(logits: Floats, cut: Truncation) -> Floats:
    """The logits that may be drawn; the others are minus infinity."""
    logits = np.where(logits < logits.max() + (np.log(cut.min_p) if cut.min_p else -np.inf), -np.inf, logits)
    if cut.top_k:
        logits = np.where(logits < sorted(logits)[-min(cut.top_k, len(logits))], -np.inf, logits)
    if cut.top_p < 1:
        mass, total = 0.0, np.exp(logits - logits.max()).sum()
        for logit in sorted(logits, reverse=True):
            mass += np.exp(logit - logits.max()) / total
            if mass >= cut.top_p:
                return np.where(logits < logit, -np.inf, logits)
    return logits


def plainly_drawn(logits_v: Tensor, one: Draw) -> int:
    logits, drawing = scaled(logits_v, one), one.drawing
    if not drawing.temperature:
        return int(logits.argmax())
    noise = gumbel(drawing.seed, one.sequence, one.index, len(logits))
    return int((kept(logits, drawing.truncation) + noise).argmax())


def plain_logprobs(logits_v: Tensor, one: Draw) -> Floats:
    logits = scaled(logits_v, one)
    return np.asarray(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def some_logits(rng: np.random.Generator, vocabulary: int) -> Tensor:
    """Of a random spread, and often rounded as bfloat16 is, so that there are equals."""
    logits = torch.from_numpy(rng.normal(size=vocabulary) * rng.choice([0.1, 1, 5, 20])).float()
    return logits.bfloat16().float() if rng.random() < 0.5 else logits


def some_draw(rng: np.random.Generator, vocabulary: int) -> Draw:
    """Each option is used by half of the rows, with numbers at which nothing lies by chance."""

    def half(value: float, unused: float) -> float:
        return float(np.float32(value)) if rng.random() < 0.5 else unused

    seen = Seen()
    if rng.random() < 0.5:
        seen.read(rng.integers(vocabulary, size=rng.integers(200)).tolist())
        for token in rng.integers(vocabulary, size=rng.integers(200)).tolist():
            seen.add(token)
    biased = rng.permutation(vocabulary)[: rng.integers(vocabulary) // 2]
    drawing = Drawing(
        temperature=half(rng.uniform(0.05, 3), 0.0),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        truncation=Truncation(
            half(rng.uniform(0, 1), 0.0), int(half(float(rng.integers(1, 2 * vocabulary)), 0)), half(rng.random(), 1.0)
        ),
        penalties=Penalties(half(rng.uniform(0.3, 3), 1.0), half(rng.uniform(-2, 2), 0), half(rng.uniform(-2, 2), 0)),
        bias=Bias(biased, rng.normal(size=len(biased))),
        logprobs=[None, 0, 3, MOST_LOGPROBS][rng.integers(4)],
    )
    banned = rng.permutation(vocabulary)[: rng.integers(vocabulary)] if rng.random() < 0.5 else np.empty(0, np.int64)
    allowed = np.append(rng.permutation(vocabulary)[: rng.integers(vocabulary)], rng.permutation(vocabulary)[:1])
    guide = partial(fill, allowed, vocabulary) if rng.random() < 0.5 else None
    if guide is not None:
        banned = np.setdiff1d(banned, allowed[-1:])
    return Draw(drawing, int(rng.integers(2**40)), int(rng.integers(16)), banned, seen, guide)


def fill(allowed: npt.NDArray[np.int64], vocabulary: int, bits: Bits) -> None:
    """Sets the bits of these tokens, and those that stand for none."""
    whole = np.ones(len(bits) * 8, dtype=bool)
    whole[:vocabulary] = False
    whole[allowed] = True
    bits[:] = np.packbits(whole, bitorder="little")


@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([1, 2, 17, 255, 256, 257, 400, 4500]))
@settings(max_examples=150, deadline=None)
def test_a_batch_draws_what_a_plain_reference_draws_row_by_row(seed: int, rows: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.stack([some_logits(rng, vocabulary) for _ in range(rows)])
    draws = [some_draw(rng, vocabulary) for _ in range(rows)]
    drawn = draw_rows(logits.clone(), draws)
    for row, one, token in zip(logits, draws, drawn, strict=True):
        assert isinstance(token, Drawn)
        assert token == plainly_drawn(row, one)
        if one.drawing.logprobs is None:
            assert token.logprobs is None
            continue
        assert token.logprobs is not None
        expected = plain_logprobs(row, one)
        assert token.logprobs.drawn == pytest.approx(expected[token], abs=1e-9)
        possible = int(np.isfinite(expected).sum())
        told = token.logprobs.top
        assert len(told) == min(one.drawing.logprobs, possible)
        assert [logprob for _, logprob in told] == pytest.approx(sorted(expected, reverse=True)[: len(told)], abs=1e-9)
        assert [expected[other] for other, _ in told] == pytest.approx([logprob for _, logprob in told], abs=1e-9)


@given(st.integers(0, 2**32), st.integers(2, 8))
@settings(max_examples=50, deadline=None)
def test_what_a_row_draws_does_not_depend_on_the_batch(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.stack([some_logits(rng, 3000) for _ in range(rows)])
    draws = [some_draw(rng, 3000) for _ in range(rows)]
    together = draw_rows(logits.clone(), draws)
    alone = [draw_rows(row.unsqueeze(0).clone(), [one])[0] for row, one in zip(logits, draws, strict=True)]
    assert together == alone
    for mine, theirs in zip(together, alone, strict=True):
        assert isinstance(mine, Drawn) and isinstance(theirs, Drawn)
        assert mine.logprobs == theirs.logprobs


@pytest.mark.parametrize("top_p", [0.01, 0.7, 0.999, 0.9999999])
def test_a_nucleus_of_a_large_and_flat_vocabulary_is_found(top_p: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=20_000))
    drawing = Drawing(temperature=1.0, truncation=Truncation(top_p=top_p))
    draws = [Draw(drawing, index) for index in range(8)]
    drawn = draw_rows(logits.repeat(8, 1), draws)
    assert drawn == [plainly_drawn(logits, one) for one in draws]


def test_equals_are_kept_or_left_out_together() -> None:
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, -1.0])
    for cut in (Truncation(top_k=2), Truncation(min_p=float(np.exp(-1.0)) * 0.999), Truncation(top_p=0.8)):
        drawn = {draw(logits, Drawing(2.0, truncation=cut), index=index) for index in range(60)}
        assert drawn == {0, 1, 2, 3}
    assert {draw(logits, Drawing(2.0, truncation=Truncation(top_k=1)), index=index) for index in range(50)} == {0}


def test_the_likeliest_token_is_kept_however_little_may_be() -> None:
    logits = torch.tensor([1.0, 2.0, 1.5])
    for cut in (Truncation(top_p=1e-30), Truncation(min_p=1.0), Truncation(top_k=1)):
        assert draw(logits, Drawing(100.0, 5, cut), index=1) == 1


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert draw(torch.tensor([0.0, 2.0, 2.0, 2.0]), Drawing(), index=0) == 1
    assert draw(torch.tensor([0.0, 2.0, 2.0, 2.0]), Drawing(), index=0, banned=[1]) == 2


def test_draws_have_the_frequencies_of_the_softmax() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = torch.from_numpy(np.log(probabilities) * 2)
    drawing = Drawing(temperature=2.0, seed=11)
    count = 5_000
    drawn = draw_rows(logits.repeat(count, 1), [Draw(drawing, index) for index in range(count)])
    counts = Counter(int(token) for token in drawn if isinstance(token, Drawn))
    expected = probabilities * count
    frequencies = [counts[token] for token in range(5)]
    assert frequencies == [2455, 1259, 787, 346, 153], "they are fixed by the seed"
    # With four degrees of freedom one seed of a thousand exceeds it.
    assert sum((np.array(frequencies) - expected) ** 2 / expected) < 18.47


def test_a_stream_continued_elsewhere_draws_the_same_and_no_two_places_share_numbers() -> None:
    logits = torch.zeros(1000)
    drawing = Drawing(temperature=1.0, seed=2**64 - 1)
    whole = draw_rows(logits.repeat(40, 1), [Draw(drawing, index) for index in range(40)])
    assert draw_rows(logits.repeat(15, 1), [Draw(drawing, index) for index in range(25, 40)]) == whole[25:]
    places = [
        Draw(drawing, 0),
        Draw(drawing, 1),
        Draw(drawing, 0, sequence=1),
        Draw(replace(drawing, seed=0), 0),
        Draw(drawing, 2**40),
    ]
    assert len({int(token) for token in draw_rows(logits.repeat(5, 1), places) if isinstance(token, Drawn)}) == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("drawing", [Drawing(), Drawing(1.0, truncation=Truncation(top_p=0.5), logprobs=3)])
def test_b136_a_logit_that_is_not_finite_fails_its_own_row_alone(bad: float, drawing: Drawing) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    sound = draw_rows(logits.clone(), [Draw(drawing, 0)] * 3)
    logits[1, 7] = bad
    first, failed, last = draw_rows(logits, [Draw(drawing, 0)] * 3)
    assert isinstance(failed, ServerError) and failed.reason == "NONFINITE"
    assert [first, last] == [sound[0], sound[2]]


@pytest.mark.parametrize("vocabulary", [50, 500])
@pytest.mark.parametrize("cut", [Truncation(), Truncation(0.1, 3, 0.5), Truncation(top_p=0.5), Truncation(1.0)])
def test_b133_where_every_token_is_banned_the_row_fails_and_others_go_on(vocabulary: int, cut: Truncation) -> None:
    banned = np.arange(vocabulary)
    drawing = Drawing(1.0, truncation=cut, logprobs=2)
    failed, drawn = draw_rows(torch.zeros(2, vocabulary), [Draw(drawing, 0, banned=banned), Draw(drawing, 0)])
    assert isinstance(failed, ServerError) and failed.reason == "NONFINITE"
    assert isinstance(drawn, Drawn)
    with pytest.raises(ServerError):
        draw(torch.zeros(50), Drawing(), index=0, banned=range(50))


@pytest.mark.parametrize("drawing", [Drawing(), Drawing(1.0, truncation=Truncation(top_p=0.5), logprobs=3)])
def test_a_guide_that_allows_nothing_fails_its_row_and_others_draw_as_alone(drawing: Drawing) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    sevens = partial(fill, np.array([7]), 50)
    alone = draw_rows(logits.clone(), [Draw(drawing, 0)] * 4)
    draws = [Draw(drawing, 0), Draw(drawing, 0, guide=_nothing), Draw(drawing, 0, guide=sevens), Draw(drawing, 0)]
    first, failed, guided, last = draw_rows(logits.clone(), draws)
    assert isinstance(failed, ServerError) and failed.reason == "NONFINITE"
    assert [first, guided, last] == [alone[0], 7, alone[3]]
    neither = replace(draws[2], banned=np.array([7]))
    assert isinstance(draw_rows(logits, [neither, neither, draws[0], draws[0]])[0], ServerError)


@pytest.mark.parametrize("vocabulary", [1, 8, 447, 1000])
def test_bits_mean_the_same_on_every_device(vocabulary: int) -> None:
    bits = np.random.default_rng(vocabulary).integers(0, 256, (3, -(-vocabulary // 8)), dtype=np.uint8)
    expected = [[not bits[row, token // 8] >> token % 8 & 1 for token in range(vocabulary)] for row in range(3)]
    assert banned(bits, vocabulary).tolist() == expected
    assert banned_on(torch.device("cpu"), bits, vocabulary).tolist() == expected


def _nothing(bits: Bits) -> None:
    """Allows what is beyond the vocabulary alone."""
    bits[:] = 0
    bits[-1] = 0b1111_1100  # of 50 tokens the last byte has two


def test_the_largest_numbers_that_may_be_asked_for_leave_a_token_to_draw() -> None:
    logits = torch.full((4,), torch.finfo(torch.float32).max)
    logits[2] = -torch.finfo(torch.float32).max
    largest = float(torch.finfo(torch.float32).max)
    drawing = Drawing(
        temperature=float(torch.finfo(torch.float32).tiny),
        penalties=Penalties(1e6, -2, -2),
        bias=Bias(np.array([3]), np.array([largest])),
        logprobs=4,
    )
    seen = Seen()
    seen.read([2])
    (drawn,) = draw_rows(logits.unsqueeze(0), [Draw(drawing, 0, seen=seen)])
    assert isinstance(drawn, Drawn)
    assert drawn == 3
    assert drawn.logprobs is not None
    assert drawn.logprobs.drawn == 0.0


def test_what_was_seen_is_counted_in_the_output_alone() -> None:
    seen = Seen()
    seen.read([5, 6, 5])
    for token in [6, 7, 7, *range(100, 300), 7]:
        seen.add(token)
    counts = dict(zip(seen.ids.tolist(), seen.counts.tolist(), strict=True))
    assert counts == {5: 0, 6: 1, 7: 3} | dict.fromkeys(range(100, 300), 1)


def test_a_penalty_of_the_output_does_not_touch_the_prompt() -> None:
    seen = Seen()
    seen.read([0])
    seen.add(1)
    logits = torch.tensor([1.0, 0.9, 0.5])
    for penalties, expected in ((Penalties(presence=1.0), 0), (Penalties(frequency=1.0), 0), (Penalties(4.0), 2)):
        (drawn,) = draw_rows(logits.unsqueeze(0).clone(), [Draw(Drawing(penalties=penalties), 2, seen=seen)])
        assert drawn == expected
