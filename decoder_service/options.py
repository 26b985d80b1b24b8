"""The wire's sampling options to ours. What this release does not do is refused by name, never passed over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from chiasm.errors import InvalidRequest
from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service.language import Language, read_guide
from decoder_service.penalties import NO_BIAS, Bias, Penalties
from decoder_service.sampler import MOST_LOGPROBS, Drawing
from decoder_service.truncation import Truncation

MOST_SEQUENCES = 16
"""Answers to one prompt."""

_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 100, "0 to 100"),
    "top_p": (math.ulp(0.0), 1, "more than 0, at most 1"),
    "min_p": (0, 1, "0 to 1"),
    "repetition_penalty": (math.ulp(0.0), 1e6, "more than 0, at most 1000000"),
    "presence_penalty": (-2, 2, "-2 to 2"),
    "frequency_penalty": (-2, 2, "-2 to 2"),
    "max_tokens": (1, 2**31 - 1, "1 to 2147483647"),
    "n": (1, MOST_SEQUENCES, f"1 to {MOST_SEQUENCES}"),
    "logprobs": (0, MOST_LOGPROBS, f"0 to {MOST_LOGPROBS}"),
}
MOST_STOPS = 16
STOP_BYTES = 256
"""Stop strings of one request, and the bytes of each: every text is compared with all of them."""


@dataclass(frozen=True, slots=True)
class Options:
    """How an answer is drawn and where it ends.

    Attributes:
        n: answers to the prompt.
        max_tokens: None means up to the end of the context.
        min_tokens: it does not end by itself before this many.
        stop: strings that end it and are no part of it.
        stop_ids, banned_ids: beside the checkpoint's own.
        skip_special_tokens: control tokens have no text.
        language: what it must keep to; None for none.
    """

    drawing: Drawing
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    banned_ids: frozenset[int]
    ignore_eos: bool
    skip_special_tokens: bool
    language: Language | None


def read_options(sampling: pb.SamplingParams, seed: int, vocabulary: int) -> Options:
    """Raises InvalidRequest for a value out of range, Unsupported for an option that is not built."""
    for name, (low, high, allowed) in _RANGES.items():
        value = getattr(sampling, name)
        # Written so that NaN, which compares false with everything, is refused.
        if sampling.HasField(name) and not low <= value <= high:  # type: ignore[arg-type]
            raise InvalidRequest.out_of_range(name, value, allowed, name)
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        raise InvalidRequest.out_of_range(
            "min_tokens", sampling.min_tokens, f"at most max_tokens ({max_tokens})", "min_tokens"
        )
    for name in ("stop_token_ids", "banned_token_ids"):
        _check_ids(name, getattr(sampling, name), vocabulary)
    if len(set(sampling.banned_token_ids)) >= vocabulary:
        raise InvalidRequest.out_of_range(
            "banned_token_ids", len(sampling.banned_token_ids), f"fewer than {vocabulary} ids", "banned_token_ids"
        )
    drawing = Drawing(
        temperature=sampling.temperature,
        seed=seed,
        truncation=Truncation(_said(sampling, "min_p", 0.0), sampling.top_k, _said(sampling, "top_p", 1.0)),
        penalties=Penalties(
            _said(sampling, "repetition_penalty", 1.0), sampling.frequency_penalty, sampling.presence_penalty
        ),
        bias=_bias(sampling.logit_bias, vocabulary),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )
    return Options(
        drawing=drawing,
        n=sampling.n if sampling.HasField("n") else 1,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        stop=_stop(sampling.stop),
        stop_ids=frozenset(sampling.stop_token_ids),
        banned_ids=frozenset(sampling.banned_token_ids),
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True,
        language=read_guide(sampling.guide) if sampling.HasField("guide") else None,
    )


def _said(sampling: pb.SamplingParams, name: str, default: float) -> float:
    value: float = getattr(sampling, name) if sampling.HasField(name) else default  # type: ignore[arg-type]
    return value


def _check_ids(name: str, ids: Iterable[int], vocabulary: int) -> None:
    for token in ids:
        if token >= vocabulary:
            raise InvalidRequest.out_of_range(name, token, f"0 to {vocabulary - 1}", name)


def _bias(entries: Sequence[pb.LogitBias], vocabulary: int) -> Bias:
    if not entries:
        return NO_BIAS
    ids = [entry.token_id for entry in entries]
    _check_ids("logit_bias", ids, vocabulary)
    if len(set(ids)) < len(ids):
        raise InvalidRequest.out_of_range("logit_bias", len(ids), "each token once", "logit_bias")
    for entry in entries:
        if not math.isfinite(entry.bias):
            raise InvalidRequest.out_of_range("logit_bias", entry.bias, "finite", "logit_bias")
    return Bias(np.array(ids, dtype=np.int64), np.array([entry.bias for entry in entries], dtype=np.float64))


def _stop(strings: Sequence[str]) -> tuple[str, ...]:
    if len(strings) > MOST_STOPS:
        raise InvalidRequest.out_of_range("stop", len(strings), f"at most {MOST_STOPS} strings", "stop")
    for string in strings:
        if not 0 < (size := len(string.encode())) <= STOP_BYTES:
            raise InvalidRequest.out_of_range("stop", size, f"strings of 1 to {STOP_BYTES} bytes", "stop")
    return tuple(strings)
