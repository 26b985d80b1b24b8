"""How each form of an entry is made of what an encoder half gives, and becomes what a decoder half places.

One codec per form. What a half makes is one of two things, keys and values or states; a codec stores it, and brings it
back. It knows halves and tensors; keys, tags and stores are nothing to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from torch import Tensor

from chiasm.attention.backend import VarlenAttention
from chiasm.cache.form import Form
from chiasm.cache.quantised import dequantise, quantise
from chiasm.models.family import DecoderHalf, EncoderHalf, Trunk


class Codec(Protocol):
    """One form."""

    def encode(self, made: Tensor) -> Tensor:
        """What the encoder half made (`Form.source`) to the payload of an entry, on the same device."""
        ...

    def decode(self, payload: Tensor, half: DecoderHalf, tokens: int) -> Tensor:
        """The payload of an entry of so many vision tokens to what `DecoderHalf.place` takes. The payload lies on the
        half's device."""
        ...


class _Exact:
    """Keys and values as they are."""

    def encode(self, made: Tensor) -> Tensor:
        return made

    def decode(self, payload: Tensor, half: DecoderHalf, tokens: int) -> Tensor:
        return payload


class _States:
    """States: laid over placeholders as they are, or made into keys and values by the decoder."""

    def encode(self, made: Tensor) -> Tensor:
        return made

    def decode(self, payload: Tensor, half: DecoderHalf, tokens: int) -> Tensor:
        return payload if half.entry_shape.overlaid else half.project(payload)


class _Quantised:
    """Keys and values in 8 bits."""

    def __init__(self, form: Form) -> None:
        self._form = form

    def encode(self, made: Tensor) -> Tensor:
        return quantise(made, self._form)

    def decode(self, payload: Tensor, half: DecoderHalf, tokens: int) -> Tensor:
        return dequantise(payload, self._form, half.entry_shape.of(tokens, self._form), half.dtype)


CODECS: Final[Mapping[Form, Codec]] = {
    Form.CROSS_KV: _Exact(),
    Form.STATES: _States(),
    Form.CROSS_KV_INT8: _Quantised(Form.CROSS_KV_INT8),
    Form.CROSS_KV_FP8: _Quantised(Form.CROSS_KV_FP8),
}
"""A codec for every form."""


def payloads(
    half: EncoderHalf,
    units: Sequence[Tensor],
    forms: Sequence[Form],
    attention: VarlenAttention,
    trunk: Trunk | None = None,
) -> list[Tensor]:
    """The payloads of units of resized frames, uint8 RGB (frames, 3, height, width) each, in the form that is wanted of
    each.

    Args:
        trunk: as of `EncoderHalf.encode`.
    """
    made: dict[int, Tensor] = {}
    for source, encode in ((Form.CROSS_KV, half.encode), (Form.STATES, half.encode_states)):
        wanted = [i for i, form in enumerate(forms) if form.source is source]
        if wanted:
            made |= zip(wanted, encode([units[i] for i in wanted], attention, trunk), strict=True)
    return [CODECS[form].encode(made[i]) for i, form in enumerate(forms)]


def attachable(half: DecoderHalf, preferred: Form) -> tuple[Form, ...]:
    """The forms that a decoder takes, the preferred one first, then those that change no number. A quantised form is
    taken only by who asked for it."""
    shape = half.entry_shape
    exact = [form for form in shape.forms if not form.quantised]
    if not (shape.overlaid or half.projects):
        exact.remove(Form.STATES)  # of no use to a half that does not project them
    assert preferred.quantised or preferred in exact, f"{preferred.label} is not of this half"
    return tuple(dict.fromkeys([preferred, *exact]))
