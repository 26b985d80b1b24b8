"""Which form of entries a decoder asks for, by its settings, and what is told of it."""

from __future__ import annotations

import logging
from functools import partial

import torch

from chiasm.cache.form import Form, form_named
from chiasm.errors import Overloaded
from chiasm.models import shipping
from chiasm.models.loading import Crossing
from chiasm.models.registry import Model
from chiasm.settings import SettingsError

_log = logging.getLogger(__name__)


async def form_for(
    wanted: str, model: Model, kept: Crossing, *, secret: bytes, device: torch.device, dtype: torch.dtype
) -> Form:
    """The form of that label; for `auto` the one that the workers of this store have agreed on, or agree on now.

    Args:
        kept: where entries come from.
        dtype: in which the model is computed.
    """
    shape = model.entry_shape
    if wanted != "auto":
        form = form_named(wanted)
        if form not in shape.forms:
            made = ", ".join(one.label for one in shape.forms)
            raise SettingsError(f"entries of this model are {made}", "--forms", "leave it out")
        _tell(form, "settings")
        return form
    if shape.overlaid:
        _tell(Form.STATES, "laid over placeholders")
        return Form.STATES
    if not model.can_project:
        _tell(Form.CROSS_KV, "no projections in this folder")
    elif shipping.break_even(shape, dtype, 1.0) <= 0:
        _tell(Form.CROSS_KV, "states are not smaller")
    else:
        measure = partial(shipping.measured, kept.link, shape, device=device, dtype=dtype)
        try:
            choice = await shipping.agree(kept.store, secret, shape, dtype, measure)
        except Overloaded:
            _tell(Form.CROSS_KV, "the store takes nothing to be measured")
        else:
            rates = choice.rates
            _tell(
                choice.form,
                "measured" if choice.measured else "agreed",
                link_gb_per_s=round(rates.link / 1e9, 3),
                gflop_per_s=round(rates.flops / 1e9, 1),
                break_even_gb_per_s=round(shipping.break_even(shape, dtype, rates.flops) / 1e9, 3),
            )
            return choice.form
    return Form.CROSS_KV


def _tell(form: Form, why: str, **numbers: float) -> None:
    _log.info("form", extra={"form": form.label, "why": why, **numbers})
