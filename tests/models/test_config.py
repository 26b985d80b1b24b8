"""A MOSS-VL config.json is read strictly: nothing is guessed, and all that is wrong is told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chiasm.errors import CheckpointError
from chiasm.models.moss_vl.config import Config, read_config
from chiasm.models.moss_vl.processing import MossVLProcessor
from tests.checkpoints_tiny import TEXT, TOP, VISION, config

Data = dict[str, Any]

OPTIONAL = {
    "architectures",
    "model_type",
    "dtype",
    "vision_seq_pad_multiple",
    "tie_word_embeddings",
    "attention_bias",
    "rope_theta",
    "rope_scaling",
}
"""Not read here, or of a fixed meaning where absent; rotary keys have tests of their own."""


def problems(data: Data) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        read_config(data, "tiny")
    assert caught.value.where == "tiny"
    return caught.value.problems


def required() -> Iterator[tuple[str, str]]:
    for section, keys in (("", TOP), ("text_config", TEXT), ("vision_config", VISION)):
        yield from ((section, key) for key in keys if key not in OPTIONAL)


def name(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def test_a_whole_configuration_is_read() -> None:
    read = read_config(config(), "tiny")
    assert isinstance(read, Config)
    assert read.text.self_attention_layers == (0, 2)
    assert read.text.mrope_section == (4, 2, 2)
    assert read.vision.deepstack_visual_indexes == (0, 1)
    assert read.vision.factor == 8
    assert read.entry_shape.layers == 2


@pytest.mark.parametrize(("section", "key"), list(required()))
def test_a_missing_key_is_named(section: str, key: str) -> None:
    data = config()
    del (data[section] if section else data)[key]
    assert f"{name(section, key)} is missing" in problems(data)


def test_all_missing_keys_are_named_at_once() -> None:
    data = config()
    for section, key in required():
        del (data[section] if section else data)[key]
    found = problems(data)
    assert {f"{name(section, key)} is missing" for section, key in required()} <= set(found)


def test_missing_sections_are_named_with_all_their_keys() -> None:
    data = config()
    del data["text_config"], data["vision_config"]
    found = problems(data)
    assert "text_config is missing" in found
    assert "vision_config is missing" in found
    assert "vision_config.depth is missing" in found


def test_null_is_missing() -> None:
    assert "text_config.head_dim is missing" in problems(config(text={"head_dim": None}))


REFUSED: list[tuple[str, Callable[[], Data]]] = [
    ("text_config.attention_bias = True", lambda: config(text={"attention_bias": True})),
    ("rope_scaling.mrope_interleaved is False", lambda: config(text={"rope_scaling": rope(mrope_interleaved=False)})),
    ("rope_scaling.mrope_interleaved is None", lambda: config(text={"rope_scaling": rope(mrope_interleaved=None)})),
    ("rope_scaling.mrope_section is missing", lambda: config(text={"rope_scaling": rope(mrope_section=None)})),
    ("rope_scaling is missing", lambda: config(text={"rope_scaling": None})),
    ("rope_scaling.rope_type = 'yarn'", lambda: config(text={"rope_scaling": rope(rope_type="yarn")})),
    ("rope_scaling.type = 'linear'", lambda: config(text={"rope_scaling": rope(type="linear")})),
    ("text_config.partial_rotary_factor = 0.5", lambda: config(text={"partial_rotary_factor": 0.5})),
    (
        "rope_scaling.partial_rotary_factor = 0.25",
        lambda: config(text={"rope_scaling": rope(partial_rotary_factor=0.25)}),
    ),
    ("vision_config.temporal_patch_size = 2", lambda: config(vision={"temporal_patch_size": 2})),
    ("vision_config.in_channels = 4", lambda: config(vision={"in_channels": 4})),
    ("tie_word_embeddings = True", lambda: config(tie_word_embeddings=True)),
    ("vision_seq_pad_multiple = 8", lambda: config(vision_seq_pad_multiple=8)),
    ("text_config.hidden_act = 'gelu'", lambda: config(text={"hidden_act": "gelu"})),
    ("vision_config.hidden_act = 'gelu'", lambda: config(vision={"hidden_act": "gelu"})),
    ("quantization_config = {'quant_method': 'fp8'}", lambda: config(quantization_config={"quant_method": "fp8"})),
    ("text_config.quantization_config", lambda: config(text={"quantization_config": {"quant_method": "nf4"}})),
]


def rope(**changes: Any) -> Data:
    return {**TEXT["rope_scaling"], **changes}


@pytest.mark.parametrize(("told", "data"), REFUSED, ids=[told for told, _ in REFUSED])
def test_an_option_that_is_not_done_is_refused_by_name(told: str, data: Callable[[], Data]) -> None:
    assert any(told in problem for problem in problems(data()))


def test_all_refusals_are_told_at_once() -> None:
    found = problems(
        config(
            text={"attention_bias": True, "partial_rotary_factor": 0.5, "hidden_act": "relu"},
            vision={"temporal_patch_size": 2, "hidden_act": "relu"},
            tie_word_embeddings=True,
            vision_seq_pad_multiple=8,
            quantization_config={},
        )
    )
    assert len(found) == 8


@pytest.mark.parametrize(
    "data",
    [
        config(text={"attention_bias": None}),
        config(text={"partial_rotary_factor": 1.0}),
        config(tie_word_embeddings=None, vision_seq_pad_multiple=None),
        config(text={"rope_scaling": rope(rope_type="mrope")}),
        config(auto_map={"AutoModel": "modeling.Evil"}, transformers_version="9"),
    ],
)
def test_what_changes_nothing_is_allowed(data: Data) -> None:
    assert read_config(data, "tiny").text.hidden_size == 48


# -- rotary keys -------------------------------------------------------------------------------------------------------


def test_the_rotary_base_is_read_from_either_place() -> None:
    parameters = {**rope(), "rope_theta": 5e6}
    moved = config(text={"rope_theta": None, "rope_scaling": None, "rope_parameters": parameters})
    inside = config(text={"rope_theta": None, "rope_scaling": parameters})
    both = config(text={"rope_theta": 5e6, "rope_parameters": parameters})
    for data in (moved, inside, both, config(text={"rope_theta": 5_000_000})):
        assert read_config(data, "tiny").text.rope_theta == 5e6


def test_a_missing_rotary_base_is_an_error_and_no_default() -> None:
    assert any("rope_theta is missing" in problem for problem in problems(config(text={"rope_theta": None})))


def test_two_rotary_bases_are_an_error() -> None:
    data = config(text={"rope_theta": 1e4, "rope_parameters": {**rope(), "rope_theta": 1e6}})
    assert any("rope_theta is 10000.0 and 1000000.0" in problem for problem in problems(data))


# -- impossible values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (config(text={"head_dim": "16"}), "text_config.head_dim is '16', must be of type int"),
        (config(text={"head_dim": True}), "text_config.head_dim is True, must be of type int"),
        (config(text={"num_hidden_layers": 0}), "text_config.num_hidden_layers is 0, must be at least 1"),
        (config(text={"num_attention_heads": 5}), "text_config.num_attention_heads is 5, not a multiple"),
        (config(text={"head_dim": 24}), "text_config.head_dim is 24, mrope_section [4, 2, 2]"),
        (config(text={"cross_attention_layers": []}), "text_config.cross_attention_layers are []"),
        (config(text={"cross_attention_layers": [1, 4]}), "text_config.cross_attention_layers are [1, 4]"),
        (config(text={"cross_attention_layers": [1, 1]}), "text_config.cross_attention_layers are [1, 1]"),
        (
            config(text={"cross_attention_layers": [1.0]}),
            "text_config.cross_attention_layers must be a list of integers",
        ),
        (config(text={"rope_scaling": rope(mrope_section=[4, 4])}), "rope_scaling.mrope_section is [4, 4]"),
        (config(text={"rope_scaling": rope(mrope_section=[2, 4, 2])}), "rope_scaling.mrope_section is [2, 4, 2]"),
        (config(vision={"deepstack_visual_indexes": [0, 3]}), "vision_config.deepstack_visual_indexes are [0, 3]"),
        (config(vision={"deepstack_visual_indexes": [1, 1]}), "vision_config.deepstack_visual_indexes are [1, 1]"),
        (config(vision={"num_position_embeddings": 35}), "vision_config.num_position_embeddings is 35, not a square"),
        (config(vision={"hidden_size": 36}), "vision_config.hidden_size is 36"),
        (config(vision={"out_hidden_size": 32}), "vision_config.out_hidden_size is 32, text_config.hidden_size is 48"),
        (config(image_token_id=96), "image_token_id is 96, the vocabulary has 96 ids"),
        (config(video_token_id=-1), "video_token_id is -1, must be at least 0"),
        (config(text_config=None) | {"text_config": 3}, "text_config is 3, must be of type dict"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_place(data: Data, told: str) -> None:
    assert any(problem.startswith(told) or told in problem for problem in problems(data))


def test_layers_and_taps_are_read_in_ascending_order_however_they_are_written() -> None:
    read = read_config(
        config(text={"cross_attention_layers": [3, 1]}, vision={"deepstack_visual_indexes": [1, 0]}), "t"
    )
    assert read.text.cross_attention_layers == (1, 3)
    assert read.vision.deepstack_visual_indexes == (0, 1)


# -- the files about pixels --------------------------------------------------------------------------------------------


def test_a_processor_file_may_set_budgets_and_nothing_the_model_fixes() -> None:
    read = read_config(config(), "tiny")
    files: dict[str, dict[str, object]] = {"preprocessor_config.json": {"max_frames": 8, "fps": 2, "patch_size": 4}}
    budgets = MossVLProcessor.read(read, files, "tiny").budgets
    assert (budgets.max_frames, budgets.fps, budgets.min_pixels) == (8, 2.0, 4096)
    wrong: dict[str, dict[str, object]] = {
        "preprocessor_config.json": {"patch_size": 14, "image_mean": [0.48, 0.45, 0.4]},
        "video_preprocessor_config.json": {"temporal_patch_size": 2, "merge_size": 3},
    }
    with pytest.raises(CheckpointError) as caught:
        MossVLProcessor.read(read, wrong, "tiny")
    assert len(caught.value.problems) == 4
