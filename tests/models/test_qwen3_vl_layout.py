"""Qwen3-VL's prompt and places against what the model's own processor made of 44 prompts: every id, every position."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from chiasm.chat_template import Slot, Turn
from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.media.types import Kind
from chiasm.models.family import WrittenMedium
from chiasm.models.qwen3_vl.budgets import read_budgets
from chiasm.models.qwen3_vl.config import Config, read_config
from chiasm.models.qwen3_vl.layout import Qwen3VLPrompt
from chiasm.models.qwen3_vl.processing import Qwen3VLProcessor
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import Timeline, UnitName
from chiasm.tokenizer import Tokenizer
from decoder_service.convert import read_prompt, sized_slot
from tests.checkpoints_qwen3_vl import TEMPLATE
from tests.oracles.qwen3_vl import DATA

Ints = npt.NDArray[np.int64]

RECORDED: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads((DATA / "fixtures.json").read_text(encoding="utf-8"))["cases"]
}
TENSORS = load_file(DATA / "fixtures.safetensors")
TOKENIZER = Tokenizer.from_file(DATA / "tokenizer.json")
CONFIG: Config = read_config(json.loads((DATA / "config.json").read_text(encoding="utf-8")), "recorded")
NESTED = replace(CONFIG, nested_videos=True)
VIDEOS = [name for name, case in RECORDED.items() if case["videos"]]
READINGS = [(name, reading) for name in RECORDED for reading in (("flat", "nested") if name in VIDEOS else ("either",))]

KINDS: list[Kind] = ["image", "video"]

LIST_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
"""A template that takes no content but a list of parts."""


def prompt(config: Config = CONFIG, template: str | None = None) -> Qwen3VLPrompt:
    return Qwen3VLPrompt(config, TOKENIZER, template)


def processor() -> Qwen3VLProcessor:
    v = CONFIG.vision
    budgets, _ = read_budgets(
        {},
        patch_size=v.patch_size,
        merge_size=v.spatial_merge_size,
        temporal_patch_size=v.temporal_patch_size,
    )
    return Qwen3VLProcessor(CONFIG, budgets)


def recorded(name: str, reading: str) -> tuple[list[int], Ints, int]:
    """Ids, positions and delta of a case. Its pads are all those of images: a unit's layout knows no other."""
    where = f"{name}/flat" if reading == "flat" else name
    ids = TENSORS[f"{where}/input_ids"].tolist()
    same = [CONFIG.image_token_id if i == CONFIG.video_token_id else i for i in ids]
    return same, TENSORS[f"{where}/position_ids"], int(TENSORS[f"{where}/rope_delta"][0])


class Media:
    """The media of a case in the order in which they are laid."""

    def __init__(self, name: str, family: Qwen3VLPrompt) -> None:
        case = RECORDED[name]
        self._family = family
        self._timeline = Timeline()
        self._slots = itertools.count()
        self._layout = processor().unit_layout
        self._images = iter(TENSORS.get(f"{name}/image_grid_thw", np.empty((0, 3), np.int64)).tolist())
        self._videos = iter(TENSORS.get(f"{name}/video_grid_thw", np.empty((0, 3), np.int64)).tolist())
        self._times = iter(video["timestamps_exact"] for video in case.get("videos_out", ()))

    def lay(self, kind: str, into: Timeline) -> None:
        slot = next(self._slots)
        if kind == "image":
            _, rows, columns = next(self._images)
            pieces = self._family.medium("image", [0.0])
        else:
            units, rows, columns = next(self._videos)
            times = next(self._times)
            assert len(times) == units
            pieces = self._family.medium("video", times)
        for piece in pieces:
            if isinstance(piece, int):
                into.append_unit(UnitName(slot, piece), self._layout((rows, columns)))
            else:
                into.append_text(piece)


def rendered(text: str, family: Qwen3VLPrompt) -> Iterator[list[int] | str]:
    """A recorded template's text: ids, and the kinds of the media in it, wrappers taken off and openings put there."""
    for medium in KINDS:
        opening = family.opening(medium)
        text = text.replace(f"<|vision_start|><|{medium}_pad|><|vision_end|>", f"{opening}\x02{medium}\x03")
    for i, part in enumerate(text.replace("\x03", "\x02").split("\x02")):
        if i % 2:
            yield part
        else:
            for piece in TOKENIZER.split(part):
                yield TOKENIZER.encode(piece) if isinstance(piece, str) else [piece]


@pytest.mark.parametrize(("name", "reading"), READINGS)
def test_every_recorded_prompt_has_its_ids_and_its_places(name: str, reading: str) -> None:
    family = prompt(NESTED if reading == "nested" else CONFIG)
    timeline, media = Timeline(), Media(name, family)
    for piece in rendered(RECORDED[name]["text"], family):
        if isinstance(piece, str):
            media.lay(piece, timeline)
        else:
            timeline.append_text(piece)
    ids, positions, delta = recorded(name, reading)
    assert timeline.ids() == ids
    np.testing.assert_array_equal(timeline.positions(), positions)
    assert timeline.rope_delta == delta


@pytest.mark.parametrize("template", [None, TEMPLATE, LIST_ONLY], ids=["none", "texts and lists", "lists"])
@pytest.mark.parametrize("name", [name for name, case in RECORDED.items() if not case["template_kwargs"]])
def test_turns_through_a_template_become_the_recorded_ids(name: str, template: str | None) -> None:
    """Whatever the template writes around a medium, the wrapper stands once."""
    case = RECORDED[name]
    family = prompt(template=template)
    timeline, media, kinds = Timeline(), Media(name, family), list[str]()
    turns = []
    for message in case["messages"]:
        parts: list[str | Slot] = []
        for part in [message["content"]] if isinstance(message["content"], str) else message["content"]:
            if isinstance(part, str):
                parts.append(part)
            elif part["type"] == "text":
                parts.append(part["text"])
            else:
                parts += [text for text in [family.opening(part["type"])] if text]
                parts.append(Slot(len(kinds)))
                kinds.append(part["type"])
        turns.append(Turn(message["role"], tuple(parts)))
    for piece in family.turns(turns):
        if isinstance(piece, Slot):
            media.lay(kinds[piece.index], timeline)
        else:
            timeline.append_text(piece)
    assert timeline.ids() == recorded(name, "flat" if case["videos"] else "either")[0]


def test_the_nested_reading_is_asked_for_in_the_configuration() -> None:
    data = json.loads((DATA / "config.json").read_text(encoding="utf-8"))
    assert read_config({**data, "nested_videos": True}, "recorded") == NESTED
    with pytest.raises(CheckpointError, match="nested_videos is 'yes', must be true or false"):
        read_config({**data, "nested_videos": "yes"}, "recorded")


def test_a_template_of_lists_that_loses_a_medium_is_refused() -> None:
    with pytest.raises(CheckpointError):
        prompt(template=LIST_ONLY.replace("<|image_pad|>", ""))


@pytest.mark.parametrize("text", ["Look", "Look: ", "Look:", "Look!\n", "", " ", "3 ", "<", "\u00e9\u4e00 ("])
@pytest.mark.parametrize("kind", [pb.MEDIA_KIND_VIDEO, pb.MEDIA_KIND_IMAGE])
def test_a_time_is_tokenised_as_one_with_the_text_before_its_video(text: str, kind: pb.MediaKind.ValueType) -> None:
    family, video = prompt(), kind == pb.MEDIA_KIND_VIDEO
    turn = pb.Turn(role=pb.ROLE_USER, parts=[pb.Part(text=text), pb.Part(slot=0)])
    for asked, said in (
        (pb.Prompt(plain=pb.PlainPrompt(parts=turn.parts)), text),
        (pb.Prompt(conversation=pb.Conversation(turns=[turn])), f"user\n{text}"),
    ):
        before, slot, *_ = read_prompt(asked, family, 1024, {0: kind}).pieces
        assert slot == Slot(0) and not isinstance(before, Slot)
        medium = family.medium("video", [0.25]) if video else []
        got = [*before, *(i for piece in medium[:1] if isinstance(piece, list) for i in piece[:-1])]
        expected = TOKENIZER.encode(f"{said}<0.2 seconds>" if video else said)
        assert got[-len(expected) :] == expected
        assert len(got) == len(expected) + (asked.WhichOneof("form") == "conversation")


# -- ids that a caller wrote -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "reading"), READINGS)
def test_ids_that_a_caller_wrote_are_cut_at_their_media(name: str, reading: str) -> None:
    where = f"{name}/flat" if reading == "flat" else name
    ids = TENSORS[f"{where}/input_ids"].tolist()
    pieces = prompt().written(ids)
    merge = CONFIG.vision.spatial_merge_size**2
    video_tokens = [
        [rows * columns // merge] * units
        for units, rows, columns in TENSORS.get(f"{name}/video_grid_thw", np.empty((0, 3), np.int64)).tolist()
    ]
    image_tokens = [
        [rows * columns // merge]
        for _, rows, columns in TENSORS.get(f"{name}/image_grid_thw", np.empty((0, 3), np.int64)).tolist()
    ]
    media = [piece for piece in pieces if isinstance(piece, WrittenMedium)]
    assert sorted(medium.pads for medium in media) == sorted([*video_tokens, *image_tokens])
    pad, again = CONFIG.image_token_id, list[int]()
    for piece in pieces:
        if isinstance(piece, WrittenMedium):
            for part in piece.pieces:
                again += [pad] * piece.pads[part] if isinstance(part, int) else part
        else:
            again += piece
    assert again == recorded(name, reading)[0], "what is around and between media stays as it was written"


def patch(time: str, *, pads: int = 2, pad: int = CONFIG.video_token_id) -> list[int]:
    start, end = CONFIG.vision_start_token_id, CONFIG.vision_end_token_id
    return [*TOKENIZER.encode(time), start, *[pad] * pads, end]


@pytest.mark.parametrize(
    ("ids", "media"),
    [
        ([*patch("<0.2 seconds>"), *patch("<1.2 seconds>")], [[2, 2]]),
        ([*patch("<0.0 seconds>"), *patch("<0.0 seconds>", pads=3)], [[2, 3]]),
        ([*patch("<0.2 seconds>"), *patch("<1.2 seconds>"), *patch("<0.2 seconds>")], [[2, 2], [2]]),
        ([*patch("<0.2 seconds>"), *patch("then <1.2 seconds>")], [[2], [2]]),
        ([*patch("<0.2 seconds>"), TOKENIZER.control["<|im_end|>"], *patch("<1.2 seconds>")], [[2], [2]]),
        ([*patch("<0.2 seconds>"), *patch("")], [[2], [2]]),
        ([*patch("versus<0.2 seconds>"), *patch("<1.2 seconds>")], [[2, 2]]),
        ([*patch("<0.2 seconds>", pad=CONFIG.image_token_id), *patch("<1.2 seconds>")], [[2], [2]]),
        ([CONFIG.image_token_id] * 4, [[4]]),
    ],
    ids=["on", "stands", "back", "text", "control", "no time", "text before", "kinds", "bare"],
)
def test_runs_of_video_pads_are_one_video_while_time_goes_on(ids: list[int], media: list[list[int]]) -> None:
    found = [piece.pads for piece in prompt().written(ids) if isinstance(piece, WrittenMedium)]
    assert found == media


def test_a_caller_that_writes_another_number_of_pads_than_a_unit_has_is_told_both() -> None:
    (medium,) = (piece for piece in prompt().written(patch("", pads=6)) if isinstance(piece, WrittenMedium))
    sized = dpb.DecodeSized(slot=0, revision=1, final=True)
    unit = sized.units.add(tokens=6, grid=pb.Grid(t=1, h=4, w=6))
    unit.frames.add()
    layout = processor().unit_layout
    assert sized_slot(sized, pb.MEDIA_KIND_VIDEO, prompt(), layout, medium).grids == [(4, 6)]
    unit.grid.w = 8
    with pytest.raises(InvalidRequest, match="6 placeholders are written for unit 0, which has 8") as caught:
        sized_slot(sized, pb.MEDIA_KIND_VIDEO, prompt(), layout, medium)
    assert caught.value.facts == {"placeholders": 6, "tokens": 8}


# -- the rest of the contract ------------------------------------------------------------------------------------------


def named(ids: Sequence[int]) -> str:
    return "".join(TOKENIZER.name(i) or TOKENIZER.token_bytes(i).decode() for i in ids)


def test_a_frame_of_a_growing_timeline_is_a_patch_with_its_time() -> None:
    for config in (CONFIG, NESTED):
        before, after = prompt(config).frame(12.34)
        assert (named(before), named(after)) == ("<12.3 seconds><|vision_start|>", "<|vision_end|>")


def test_text_put_into_an_answer_is_a_turn_of_its_own() -> None:
    assert named(prompt().spliced("<|im_end|>hey")) == (
        "<|im_end|>\n<|im_start|>user\n<|im_end|>hey<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt().spliced("<|im_end|>").count(TOKENIZER.control["<|im_end|>"]) == 2, "text is never control"


def test_an_answer_ends_with_its_turn_or_the_text_and_holds_no_pads() -> None:
    family = prompt()
    assert {TOKENIZER.name(i) for i in family.stop_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert {TOKENIZER.name(i) for i in family.banned_ids} == {"<|image_pad|>", "<|video_pad|>"}
    assert family.silence_id is None


def test_ids_that_the_tokenizer_numbers_otherwise_are_listed() -> None:
    wrong = replace(CONFIG, image_token_id=5, vision_end_token_id=6, text=replace(CONFIG.text, vocab_size=1000))
    with pytest.raises(CheckpointError) as caught:
        prompt(wrong)
    assert caught.value.problems == (
        "numbers <|image_pad|> 1022, config.json 5",
        "numbers <|vision_end|> 1020, config.json 6",
        "has 1024 ids, config.json 1000",
    )
