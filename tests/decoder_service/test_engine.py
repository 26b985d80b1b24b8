"""The decoder's engine: what a token costs, and that nothing is taken when not everything can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chiasm.errors import Overloaded
from chiasm.models.registry import Model, find
from decoder_service.engine import DecoderEngine, Work, token_bytes
from decoder_service.sequence import DecodeSequence
from tests import checkpoints_tiny


def engine(model: Model, *, text: int = 64, visual: int = 64) -> DecoderEngine:
    return DecoderEngine(
        model.decoder(dtype=torch.float32), model.processor, text_tokens=text, visual_tokens=visual, page_size=4
    )


def sequence(engine: DecoderEngine, rows: int) -> DecodeSequence:
    made = engine.sequence()
    made.extend([[1] * rows])
    return made


def test_a_text_token_costs_the_self_layers_only_and_a_visual_token_the_cross_layers_only(tmp_path: Path) -> None:
    model = Model(checkpoints_tiny.write(tmp_path / "tiny"))
    e = engine(model)
    text = model.config.text
    per_layer = 2 * text.num_key_value_heads * text.head_dim * 4
    crossing = len(text.cross_attention_layers)
    assert token_bytes(e.half) == ((text.num_hidden_layers - crossing) * per_layer, crossing * per_layer)
    assert (e.pools.self_kv.nbytes, e.pools.cross_kv.nbytes) == tuple(64 * size for size in token_bytes(e.half))


def test_a_step_that_has_no_pages_for_all_of_it_takes_none_and_computes_nothing() -> None:
    e = engine(Model(find("digits")), text=16)
    first, second = sequence(e, 12), sequence(e, 8)
    with pytest.raises(Overloaded) as caught:
        e.step([Work(first, 12, "last"), Work(second, 8, "last")])
    assert caught.value.reason == "KV_POOL_FULL" and caught.value.retryable
    assert e.pages.free == e.pages.total and (first.computed, second.computed) == (0, 0)
    (logits,) = e.step([Work(first, 12, "last")])
    assert logits.shape == (1, e.half.vocab_size)
    e.release(first)
    e.release(first)
    assert e.pages.free == e.pages.total


def test_logits_of_all_rows_or_of_none_can_be_had() -> None:
    e = engine(Model(find("digits")))
    s = sequence(e, 9)
    (none,) = e.step([Work(s, 4, "none")])
    (rest,) = e.step([Work(s, 5, "all")])
    assert none.shape == (0, e.half.vocab_size) and rest.shape == (5, e.half.vocab_size)
    whole = sequence(e, 9)
    (every,) = e.step([Work(whole, 9, "all")])
    assert torch.allclose(every[4:], rest, rtol=0, atol=1e-5 * float(every.abs().max()))
