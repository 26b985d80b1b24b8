"""Numbers and times that callers give, checked where a value is made. Knows ranges, not what they are for."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping

from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import GUIDE_BYTES, GUIDE_CHOICES, MAX_SECONDS

MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**32 - 1
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_BIASES = 1024
MAX_BIAS = 3.4028234663852886e38
"""The largest number that the wire's 32 bits hold."""


def conflict(message: str) -> InvalidRequest:
    return InvalidRequest("SAMPLING_CONFLICT", message)


def number(name: str, value: float | None, low: float, high: float) -> float | None:
    """`value` as it is. Raises InvalidRequest FIELD_OUT_OF_RANGE unless None or from `low` to `high`."""
    # Written so that NaN, which is in no order with anything, is out of range.
    if value is not None and not low <= (given := as_float(name, value)) <= high:
        raise InvalidRequest.out_of_range(name, given, f"from {low:g} to {high:g}")
    return value


def whole(name: str, value: int | None, low: int, high: int) -> int | None:
    """`value` as a plain int. Raises as `number`, and TypeError for what is no whole number; True is none."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        given = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if not low <= given <= high:
        raise InvalidRequest.out_of_range(name, given, f"from {low} to {high}")
    return given


def max_tokens(value: int | None) -> int | None:
    """As `whole`, from 1 to MAX_TOKENS."""
    return whole("max_tokens", value, 1, MAX_TOKENS)


def as_float(name: str, value: object) -> float:
    """Raises TypeError for what is no number."""
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be a number, not {value!r}") from None


def fps(value: float | None) -> None:
    if value is not None and not 0 < (rate := as_float("fps", value)) <= 1000:
        raise InvalidRequest.out_of_range("fps", rate, "more than 0, at most 1000")


def seconds(name: str, value: float | None) -> None:
    """Raises InvalidRequest FIELD_OUT_OF_RANGE for a limit of time that is none."""
    # False for NaN too.
    if value is not None and not 0 < as_float(name, value) <= MAX_SECONDS:
        allowed = f"more than 0 and at most {MAX_SECONDS:g} seconds, or None for no limit"
        raise InvalidRequest.out_of_range(name, value, allowed)


def times(values: Iterable[float]) -> tuple[float, ...]:
    """Finite seconds from 0, each greater than the one before; else InvalidRequest names the first that is not."""
    given = tuple(as_float("a timestamp", value) for value in values)
    before = -math.inf
    for index, time in enumerate(given):
        if not (0 <= time < math.inf and time > before):
            raise InvalidRequest(
                "TIMESTAMPS_INVALID",
                f"timestamp {index} is {time:g}; timestamps are finite seconds that grow from 0 or later",
                facts={"index": index},
            )
        if time > MAX_SECONDS:
            raise InvalidRequest.out_of_range(f"timestamps[{index}]", time, f"at most {MAX_SECONDS:g} seconds")
        before = time
    return given


def token_ids(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """Ids as a tokenizer gives them: one flat sequence of Python's ints.

    Raises InvalidRequest FIELD_OUT_OF_RANGE for one that no vocabulary has, TypeError for anything else: a tensor or a
    batch of sequences would be tokens nobody meant.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is a sequence of ints, not {type(values).__name__}")
    ids = tuple(values)
    for index, token in enumerate(ids):
        if type(token) is not int:
            raise TypeError(
                f"{name}[{index}] is a {type(token).__name__}, not an int; give one flat list, as `.tolist()` makes it"
            )
        if not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidRequest.out_of_range(f"{name}[{index}]", token, f"from 0 to {MAX_TOKEN_ID}")
    return ids


def stop(values: str | Iterable[str]) -> tuple[str, ...]:
    """Stop strings. Raises InvalidRequest FIELD_OUT_OF_RANGE for too many, an empty one and one that is too long,
    TypeError for what is no text."""
    if not isinstance(values, Iterable):
        raise TypeError(f"stop is a string or a sequence of strings, not {type(values).__name__}")
    given = (values,) if isinstance(values, str) else tuple(values)
    if len(given) > MAX_STOPS:
        raise InvalidRequest.out_of_range("stop", len(given), f"at most {MAX_STOPS} strings")
    for index, string in enumerate(given):
        if not isinstance(string, str):
            raise TypeError(f"stop[{index}] is a {type(string).__name__}, not a string")
        # A lone surrogate, which no encoding can carry, takes three bytes and is found where the request is made.
        if not 0 < (size := len(string.encode("utf-8", "surrogatepass"))) <= MAX_STOP_BYTES:
            raise InvalidRequest.out_of_range(f"stop[{index}]", size, f"a string of 1 to {MAX_STOP_BYTES} bytes")
    return given


def logit_bias(values: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Ids with what is added to their logits. Raises InvalidRequest FIELD_OUT_OF_RANGE for too many and for a number
    that is not finite, TypeError as `token_ids` and `number` do."""
    given = tuple(values.items() if isinstance(values, Mapping) else values)
    ids = token_ids("logit_bias", [token for token, _ in given])
    if len(ids) > MAX_BIASES:
        raise InvalidRequest.out_of_range("logit_bias", len(ids), f"at most {MAX_BIASES} tokens")
    if len(set(ids)) < len(ids):
        raise InvalidRequest.out_of_range("logit_bias", len(ids), "each token once")
    for token, value in given:
        number(f"logit_bias[{token}]", value, -MAX_BIAS, MAX_BIAS)
    return given


def guide(name: str, value: str | None) -> str | None:
    """`value` as it is. Raises InvalidRequest FIELD_OUT_OF_RANGE for one that is too large, TypeError for what is no
    text."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name} is a string, not {type(value).__name__}")
    _guide_size(name, [value])
    return value


def json_schema(value: str | Mapping[str, object] | None) -> str | None:
    """A JSON schema as text. Raises as `guide`, and TypeError for a mapping that JSON cannot write."""
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"json_schema is a JSON schema as a dict or a string: {error}") from None
    elif not isinstance(value, str | None):
        raise TypeError(f"json_schema is a JSON schema as a dict or a string, not {type(value).__name__}")
    return guide("json_schema", value)


def choice(values: Iterable[str]) -> tuple[str, ...]:
    """Strings. Raises InvalidRequest FIELD_OUT_OF_RANGE for too many, an empty one and for too much in all, TypeError
    for what is no text."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"choice is a sequence of strings, not {type(values).__name__}")
    given = tuple(values)
    if len(given) > GUIDE_CHOICES:
        raise InvalidRequest.out_of_range("choice", len(given), f"at most {GUIDE_CHOICES} strings")
    for index, string in enumerate(given):
        if not isinstance(string, str):
            raise TypeError(f"choice[{index}] is a {type(string).__name__}, not a string")
        if not string:
            raise InvalidRequest.out_of_range(f"choice[{index}]", string, "a string that is not empty")
    _guide_size("choice", given)
    return given


def _guide_size(name: str, strings: Iterable[str]) -> None:
    size = sum(len(string.encode("utf-8", "surrogatepass")) for string in strings)
    if size > GUIDE_BYTES:
        raise InvalidRequest.out_of_range(name, size, f"at most {GUIDE_BYTES} bytes")
