"""A text alone skips the cross layers, and what is left is a Qwen3: whole models against transformers' own, in steps of
several texts and of one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from benchmarks import _qwen3
from chiasm.models.registry import Model
from decoder_service.engine import DecoderEngine, Work

TEXT = {
    **_qwen3.TEXT,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "cross_attention_layers": [1],
    "vocab_size": 512,
    "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_several_texts_say_what_a_whole_pass_says(dtype: torch.dtype, tmp_path: Path) -> None:
    """Prompts of three lengths in one step, then ten tokens each, in company and alone by turns."""
    folder, theirs = _qwen3.both(tmp_path, dtype, TEXT)
    model = Model(folder)
    engine = DecoderEngine(model.decoder(dtype=dtype), model.processor, text_tokens=256, visual_tokens=8, page_size=4)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(16, 256, (length + 10,), generator=generator).tolist() for length in (3, 30, 17)]
    sequences = [engine.sequence() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.extend([text])
    got: list[list[Tensor]] = [[] for _ in texts]
    for step in range(11):
        works = [
            Work(one, len(text) - 10 if not step else 1, "last") for one, text in zip(sequences, texts, strict=True)
        ]
        steps = [works] if step % 2 else [[work] for work in works]
        logits = [rows for some in steps for rows in engine.step(some)]
        for one, rows in zip(got, logits, strict=True):
            one.append(rows[-1])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    with torch.inference_mode():
        for one, text in zip(got, texts, strict=True):
            expected = theirs(input_ids=torch.tensor([text])).logits[0, -11:]
            torch.testing.assert_close(torch.stack(one), expected.to(one[0].dtype), rtol=tolerance, atol=tolerance)


def test_states_are_those_of_a_whole_pass_whoever_draws_beside_them(tmp_path: Path) -> None:
    """Texts in one step, of some their states and of others their logits."""
    folder, theirs = _qwen3.both(tmp_path, torch.float32, TEXT)
    model = Model(folder)
    engine = DecoderEngine(model.decoder(dtype=torch.float32), model.processor, text_tokens=256, visual_tokens=8)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(16, 256, (length,), generator=generator).tolist() for length in (3, 30, 17, 9, 5)]
    sequences = [engine.sequence() for _ in texts]
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.extend([text])
    wanted: list[Literal["none", "last", "all"]] = ["last", "last", "all", "all", "none"]
    works = [
        Work(one, len(text), want, states=at % 2 == 0)
        for at, (one, text, want) in enumerate(zip(sequences, texts, wanted, strict=True))
    ]
    got = engine.step(works)
    for at, (rows, text, want) in enumerate(zip(got, texts, wanted, strict=True)):
        with torch.inference_mode():
            told = theirs(input_ids=torch.tensor([text]), output_hidden_states=True)
        whole = (told.logits if at % 2 else told.hidden_states[-1])[0]
        expected = {"none": whole[:0], "last": whole[-1:], "all": whole}[want]
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)
