"""A Qwen3-VL config.json is read strictly: nothing is guessed, and all that is wrong is told at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import Qwen3VLConfig

from chiasm.errors import CheckpointError
from chiasm.models.qwen3_vl.config import Config, read_config
from tests.checkpoints_qwen3_vl import DATA, TEXT, TOP, VISION, config

Data = dict[str, Any]

OPTIONAL = {"architectures", "model_type", "tie_word_embeddings", "attention_bias", "rope_parameters"}
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


def rope(**changes: Any) -> Data:
    return {**TEXT["rope_parameters"], **changes}


def tied(top: object = None, text: object = None) -> bool:
    return read_config(config(text={"tie_word_embeddings": text}, tie_word_embeddings=top), "tiny").tie_word_embeddings


def test_a_whole_configuration_is_read() -> None:
    read = read_config(config(), "tiny")
    assert isinstance(read, Config)
    assert read.text.mrope_section == (4, 2, 2)
    assert read.vision.factor == 32
    assert read.vision.patch_values == 1536
    assert read.vision.layer_norm_eps == 1e-6
    assert read.vision.align_corners
    assert not read.tie_word_embeddings
    shape = read.entry_shape
    assert shape.overlaid and shape.hidden == 3 * 48


def test_a_configuration_that_transformers_wrote_is_read() -> None:
    recorded = json.loads((DATA / "config.json").read_text(encoding="utf-8"))
    read = read_config(recorded, "recorded")
    assert read == read_config(Qwen3VLConfig(**recorded).to_dict(), "recorded")
    assert (read.text.rope_theta, read.text.mrope_section) == (5e6, (12, 10, 10))
    assert read.vision.taps == ((0, 0), (1, 1), (2, 2))


def test_mergers_go_with_taps_by_their_place_in_the_list_and_features_by_block() -> None:
    read = read_config(config(vision={"deepstack_visual_indexes": [3, 0, 2]}), "tiny")
    assert read.vision.deepstack_visual_indexes == (3, 0, 2)
    assert read.vision.taps == ((0, 1), (2, 2), (3, 0))


def test_a_model_without_taps_lays_the_main_features_alone() -> None:
    assert read_config(config(vision={"deepstack_visual_indexes": []}), "tiny").entry_shape.hidden == 48


@pytest.mark.parametrize(("section", "key"), list(required()))
def test_a_missing_key_is_named(section: str, key: str) -> None:
    data = config()
    del (data[section] if section else data)[key]
    assert f"{name(section, key)} is missing" in problems(data)


def test_all_missing_keys_are_named_at_once() -> None:
    data = config()
    for section, key in required():
        del (data[section] if section else data)[key]
    assert {f"{name(section, key)} is missing" for section, key in required()} <= set(problems(data))


# -- refusals ----------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[str, Callable[[], Data]]] = [
    ("text_config.attention_bias = True", lambda: config(text={"attention_bias": True})),
    ("text_config.hidden_act = 'gelu'", lambda: config(text={"hidden_act": "gelu"})),
    ("text_config.partial_rotary_factor = 0.5", lambda: config(text={"partial_rotary_factor": 0.5})),
    ("text_config.num_experts = 8", lambda: config(text={"num_experts": 8})),
    ("text_config.quantization_config", lambda: config(text={"quantization_config": {"quant_method": "nf4"}})),
    ("quantization_config = {'quant_method': 'fp8'}", lambda: config(quantization_config={"quant_method": "fp8"})),
    ("vision_config.hidden_act = 'gelu'", lambda: config(vision={"hidden_act": "gelu"})),
    ("vision_config.temporal_patch_size = 1", lambda: config(vision={"temporal_patch_size": 1})),
    ("vision_config.in_channels = 4", lambda: config(vision={"in_channels": 4})),
    (
        "vision_config.rope_parameters.rope_type = 'linear'",
        lambda: config(vision={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
    ),
    (
        "rope_parameters.mrope_interleaved is False",
        lambda: config(text={"rope_parameters": rope(mrope_interleaved=False)}),
    ),
    ("rope_parameters.mrope_section is missing", lambda: config(text={"rope_parameters": rope(mrope_section=None)})),
    ("rope_parameters.rope_type = 'yarn'", lambda: config(text={"rope_parameters": rope(rope_type="yarn")})),
    ("rope_scaling is missing", lambda: config(text={"rope_parameters": None})),
]


@pytest.mark.parametrize(("told", "data"), OPTIONS, ids=[told for told, _ in OPTIONS])
def test_an_option_that_is_not_done_is_refused_by_name(told: str, data: Callable[[], Data]) -> None:
    assert any(told in problem for problem in problems(data()))


@pytest.mark.parametrize(
    "data",
    [
        config(text={"attention_bias": None}),
        config(text={"rope_parameters": rope(rope_type="mrope")}),
        config(vision={"rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0}}),
        config(auto_map={"AutoModel": "modeling.Evil"}, processor_class="Qwen3VLProcessor", transformers_version="9"),
    ],
)
def test_what_changes_nothing_is_allowed(data: Data) -> None:
    assert read_config(data, "tiny") == read_config(config(), "tiny")


# -- what stands in more than one place --------------------------------------------------------------------------------


def test_rotary_settings_are_read_where_either_release_of_transformers_writes_them() -> None:
    four = config(text={"rope_parameters": None, "rope_scaling": rope(rope_theta=None), "rope_theta": 1e4})
    assert read_config(four, "tiny") == read_config(config(), "tiny")


def test_the_vision_transformers_own_rotary_base_is_read() -> None:
    read = read_config(config(vision={"rope_parameters": {"rope_type": "axial", "rope_theta": 500.0}}), "tiny")
    assert read.vision.rope_theta == 500.0


def test_the_outer_word_about_the_head_rules_and_the_inner_stands_in_for_it() -> None:
    assert not tied()
    assert tied(top=True) and tied(text=True) and tied(top=True, text=False)
    assert not tied(top=False, text=True)
    for found in (problems(config(tie_word_embeddings=1)), problems(config(text={"tie_word_embeddings": "yes"}))):
        assert "must be true or false" in found[0]


def test_how_positions_are_interpolated_is_a_setting() -> None:
    assert not read_config(config(vision={"align_corners": False}), "tiny").vision.align_corners
    (problem,) = problems(config(vision={"align_corners": "no"}))
    assert problem == "vision_config.align_corners is 'no', must be true or false"


# -- impossible values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (config(text={"head_dim": "16"}), "text_config.head_dim is '16', must be of type int"),
        (config(text={"num_attention_heads": 5}), "text_config.num_attention_heads is 5, not a multiple"),
        (config(text={"head_dim": 24}), "text_config.head_dim is 24, mrope_section [4, 2, 2]"),
        (
            config(vision={"deepstack_visual_indexes": [0, 4]}),
            "deepstack_visual_indexes are [0, 4], must be blocks of 4",
        ),
        (config(vision={"deepstack_visual_indexes": [-1]}), "deepstack_visual_indexes are [-1], must be blocks of 4"),
        (
            config(vision={"deepstack_visual_indexes": [1, 1, 2]}),
            "deepstack_visual_indexes are [1, 1, 2]: 3 mergers for 2 blocks",
        ),
        (
            config(text={"num_hidden_layers": 2}, vision={"deepstack_visual_indexes": [0, 1, 2]}),
            "deepstack_visual_indexes name 3 blocks, the text has 2 layers",
        ),
        (config(vision={"num_position_embeddings": 35}), "vision_config.num_position_embeddings is 35, not a square"),
        (config(vision={"hidden_size": 36}), "vision_config.hidden_size is 36"),
        (config(vision={"out_hidden_size": 32}), "vision_config.out_hidden_size is 32, text_config.hidden_size is 48"),
        (config(image_token_id=1024), "image_token_id is 1024, the vocabulary has 1024 ids"),
        (config(video_token_id=-1), "video_token_id is -1, must be at least 0"),
        (config(vision_config=None) | {"vision_config": 3}, "vision_config is 3, must be of type dict"),
    ],
)
def test_a_value_that_cannot_be_is_told_with_its_place(data: Data, told: str) -> None:
    assert any(told in problem for problem in problems(data))
