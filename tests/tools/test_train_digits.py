"""How the digits checkpoint is made: its split, tokenizer, episodes and files, a training step through both halves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import cast

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.nn import functional as F

from chiasm.chat_template import Slot, Turn
from chiasm.models.registry import Model
from chiasm.tokenizer import Tokenizer
from tests import digits
from tools.train_digits import held_out, model
from tools.train_digits.data import EMPTY, SIDE, Digits, draw, split
from tools.train_digits.episodes import READ, STREAM, TASKS, Form, Task, Writer, ask_time, collate, draw_episode
from tools.train_digits.train import Plan, Source, encode, logits_of, rate_at

TOKENIZER = Tokenizer(model.tokenizer_json())
CONFIG = model.configuration()
WRITER = Writer(CONFIG, TOKENIZER)


# -- digits ------------------------------------------------------------------------------------------------------------


def test_the_split_is_four_to_one_without_a_common_digit() -> None:
    train, others = split()
    assert (len(train), len(others)) == (1437, 360)
    again_train, again_others = split()
    assert np.array_equal(train.cells, again_train.cells)
    assert np.array_equal(others.cells, again_others.cells)
    from sklearn.datasets import load_digits

    source = load_digits().images.astype(np.uint8)
    together = np.concatenate([train.cells, others.cells])
    order = np.lexsort(together.reshape(len(together), -1).T)
    expected = np.lexsort(source.reshape(len(source), -1).T)
    assert np.array_equal(together[order], source[expected])


def test_no_held_out_drawing_was_trained_on() -> None:
    train, others = split()
    seen = {cells.tobytes() for cells in train.cells}
    assert [i for i, cells in enumerate(others.cells) if cells.tobytes() in seen] == []


def test_the_shipped_sheet_holds_the_held_out_part() -> None:
    _, others = split()
    shipped = digits.sheet()
    assert np.array_equal(shipped.cells, others.cells)
    assert np.array_equal(shipped.labels, others.labels)


def test_a_sheet_of_other_grey_levels_is_refused() -> None:
    picture = held_out.sheet(Digits(np.full((20, 8, 8), 16, dtype=np.uint8), np.zeros(20, dtype=np.int64)))
    with pytest.raises(ValueError, match="no sheet"):
        held_out.read_sheet(picture + np.uint8(1), "0" * 20)


def test_drawing_repeats_from_its_seed_and_leaves_empty_frames_without_ink() -> None:
    cells = torch.from_numpy(digits.sheet().cells[:8])
    shown = torch.tensor([True] * 4 + [False] * 4)
    first = draw(cells, shown, torch.Generator().manual_seed(3))
    assert first.shape == (8, 3, SIDE, SIDE)
    assert first.dtype == torch.uint8
    assert torch.equal(first, draw(cells, shown, torch.Generator().manual_seed(3)))
    blank = draw(torch.zeros_like(cells), shown, torch.Generator().manual_seed(3))
    assert not torch.equal(first[:4], blank[:4])
    assert torch.equal(first[4:], blank[4:])


# -- shipped files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", digits.shipped_clips(), ids=lambda clip: clip.path.name)
def test_a_shipped_clip_is_h264_with_a_frame_per_answer(clip: digits.ShippedClip) -> None:
    with av.open(clip.path, "r") as container:
        assert container.streams.video[0].codec_context.name == "h264"
        frames = list(container.decode(video=0))
    assert [(f.width, f.height) for f in frames] == [(SIDE, SIDE)] * len(clip.digits)
    assert [f.time for f in frames] == pytest.approx(clip.seconds)


def test_shipped_images_are_frames_of_the_models_size() -> None:
    for path, digit in digits.shipped_images():
        with Image.open(path) as image:
            assert image.size == (SIDE, SIDE)
        assert str(digit) in path.name


def test_an_encoded_clip_keeps_its_frames_and_its_rate() -> None:
    rng = np.random.default_rng(0)
    frames = [digits.frame(cells, rng) for cells, _ in digits.held_out_digits()[:5]] + [digits.empty_frame(rng)]
    with av.open(io.BytesIO(digits.clip(frames, fps=2.0)), "r") as container:
        decoded = [(f.time, f.to_ndarray(format="rgb24").astype(int)) for f in container.decode(video=0)]
    assert [time for time, _ in decoded] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert all(np.abs(got - sent).mean() < 12 for (_, got), sent in zip(decoded, frames, strict=True))


def test_the_shipped_tokenizer_and_configuration_are_what_the_command_writes() -> None:
    assert (digits.CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8") == model.tokenizer_json() + "\n"
    written = json.loads((digits.CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert written == model.config_json(model.tokenizer_json())


def test_the_shipped_weights_are_bfloat16_small_and_fill_both_halves() -> None:
    assert (digits.CHECKPOINT / "model.safetensors").stat().st_size <= 4_000_000
    opened = Model(digits.CHECKPOINT)
    tensors = opened.checkpoint.tensors
    assert {tensors.describe(name)[0] for name in tensors} == {"BF16"}
    assert set(tensors) == opened.weights.names() & set(tensors)
    opened.encoder()
    opened.decoder()


# -- tokenizer ---------------------------------------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_byte_has_a_token() -> None:
    assert {TOKENIZER.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


@given(st.sampled_from(model.CONTROL), st.text(max_size=10), st.text(max_size=10))
def test_text_never_becomes_a_control_token(name: str, before: str, after: str) -> None:
    assert not set(TOKENIZER.encode(before + name + after)) & set(TOKENIZER.control.values())


@pytest.mark.parametrize("word", model.WORDS)
def test_a_word_of_the_prompts_is_one_token(word: str) -> None:
    assert len(TOKENIZER.encode(word)) == 1


@pytest.mark.parametrize(("written", "last"), [("2.0 seconds", "2.0"), ("12.5 seconds", "2.5"), ("?7.1", "7.1")])
def test_the_end_of_a_time_is_one_token(written: str, last: str) -> None:
    assert last.encode() in [TOKENIZER.token_bytes(token) for token in TOKENIZER.encode(written)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_each_digit_of_an_answer_is_its_own_token(numbers: list[int]) -> None:
    tokens = [TOKENIZER.token_bytes(token) for token in TOKENIZER.encode(" ".join(map(str, numbers)))]
    assert tokens == b" ".join(b"%d" % n for n in numbers).replace(b" ", b"\0 \0").split(b"\0")


# -- episodes ----------------------------------------------------------------------------------------------------------


def taught(episode_ids: list[int], rows: list[int]) -> str:
    """What the taught rows are followed by; control tokens by name."""
    said = [episode_ids[row + 1] for row in rows]
    return "".join(TOKENIZER.name(token) or TOKENIZER.decode([token]) for token in said)


def test_only_answers_are_taught_in_a_conversation_of_two_questions() -> None:
    turns = [
        Turn("system", ("You read digits in order.",)),
        Turn("user", (Slot(0), READ)),
        Turn("assistant", ("3 7",)),
        Turn("user", (ask_time(1.0),)),
    ]
    episode = WRITER.answered(turns, [("video", [0.0, 1.0])], "7", [3, 7])
    assert taught(episode.timeline.ids(), episode.taught) == "3 7<|im_end|>7<|im_end|>"


def test_a_stream_teaches_what_to_say_to_each_frame() -> None:
    episode = WRITER.stream([7, EMPTY], [0.0, 1.0], silent_first=True)
    ids = episode.timeline.ids()
    assert taught(ids, episode.taught) == "<|silence|><|response|>7<|silence|><|silence|>"
    written = "".join(TOKENIZER.name(token) or TOKENIZER.decode([token]) for token in ids)
    assert written == (
        f"<|im_start|>user\n{STREAM}<|im_end|>\n<|im_start|>assistant\n<|silence|>"
        "<|vision_start|><|time_start|>0.0 seconds<|time_end|><|image_pad|><|vision_end|>"
        "<|response|>7<|silence|>"
        "<|vision_start|><|time_start|>1.0 seconds<|time_end|><|image_pad|><|vision_end|><|silence|>"
    )


@pytest.mark.parametrize("task", TASKS)
def test_an_episode_lays_a_unit_per_frame_and_answers_after_seeing_them(task: Task) -> None:
    rng = np.random.default_rng(5)
    shown = [4, 2, 2, 9, 0]
    for _ in range(20):
        form = Form.draw(task, len(shown), rng)
        episode = draw_episode(WRITER, task, shown, form, rng)
        timeline = episode.timeline
        assert len(timeline.units) == 5
        assert episode.shown == shown
        if task != "stream":
            assert all(timeline.visible(row, row + 1)[0] == 5 for row in episode.taught)


def test_a_batch_keeps_each_timelines_rows_and_refuses_unequal_clips() -> None:
    short = WRITER.stream([1], [0.0], silent_first=False)
    long = WRITER.stream([2], [0.0], silent_first=True)
    batch = collate([short, long], WRITER)
    rows = len(long.timeline)
    assert batch.ids_bt.shape == (2, rows)
    assert batch.ids_bt[0, : len(short.timeline)].tolist() == short.timeline.ids()
    assert batch.boundaries_bt2[0, -1].tolist() == [0, 0]
    assert np.array_equal(batch.positions_3bt[:, 1].numpy(), long.timeline.positions())
    flat = batch.ids_bt.flatten()
    assert flat[batch.logits_at + 1].tolist() == batch.targets.tolist()
    with pytest.raises(ValueError, match="equally many"):
        collate([short, WRITER.stream([1, 2], [0.0, 1.0], silent_first=False)], WRITER)


# -- training ----------------------------------------------------------------------------------------------------------


def test_gradients_reach_every_parameter_of_both_halves() -> None:
    encoder, decoder = model.fresh(CONFIG, torch.Generator().manual_seed(0))
    source = Source(digits.sheet(), WRITER, Plan(steps=10, batch=4))
    episodes, pictures = source.draw("time", 2)
    batch = collate(episodes, WRITER)
    F.cross_entropy(logits_of(decoder, encode(encoder, pictures), batch), batch.targets).backward()
    for half in (encoder, decoder):
        still = [name for name, p in half.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert still == []


def test_fresh_halves_are_whole_and_repeat_from_their_seed() -> None:
    first = model.fresh(CONFIG, torch.Generator().manual_seed(1))
    second = model.fresh(CONFIG, torch.Generator().manual_seed(1))
    for one, other in zip(first, second, strict=True):
        for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.isfinite(a).all(), name
            assert torch.equal(a, b), name


def test_a_saved_checkpoint_opens_with_the_weights_it_was_given(tmp_path: Path) -> None:
    encoder, decoder = model.fresh(CONFIG, torch.Generator().manual_seed(2))
    model.save(tmp_path, encoder, decoder)
    opened = Model(tmp_path)
    for made, loaded in ((encoder, opened.encoder()), (decoder, opened.decoder())):
        stored = dict(cast(nn.Module, loaded).named_parameters())
        for name, parameter in made.named_parameters():
            assert torch.equal(stored[name], parameter.to(torch.bfloat16)), name


def test_the_rate_rises_then_falls_to_a_hundredth() -> None:
    plan = Plan(steps=1000, warmup=100)
    rates = [rate_at(step, plan) for step in range(1000)]
    assert max(rates) == pytest.approx(plan.rate)
    assert rates.index(max(rates)) in (99, 100)
    assert rates[-1] == pytest.approx(plan.rate / 100, rel=0.05)
