"""MOSS-VL's processor files are read whole or refused, and the frames a request names come before those it samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.media.sample import SamplingOptions, share_frames
from chiasm.models.family import MediumFacts
from chiasm.models.moss_vl.config import read_config
from chiasm.models.moss_vl.processing import Budgets, MossVLProcessor
from tests.checkpoints_tiny import config

CONFIG = read_config(config(), "tiny")
IMAGES = "preprocessor_config.json"
VIDEOS = "video_preprocessor_config.json"
Data = dict[str, Any]


def budgets(images: Data | None = None, videos: Data | None = None) -> Budgets:
    files = {name: data for name, data in ((IMAGES, images), (VIDEOS, videos)) if data is not None}
    return MossVLProcessor.read(CONFIG, files, "tiny").budgets


def problems(images: Data | None = None, videos: Data | None = None) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        budgets(images, videos)
    assert caught.value.where == "tiny"
    return caught.value.problems


# -- files -------------------------------------------------------------------------------------------------------------


def test_without_files_the_official_command_lines_budgets_hold() -> None:
    assert budgets() == Budgets()
    b = Budgets()
    assert (b.min_pixels, b.max_pixels, b.multi_image_max_pixels) == (4_096, 16_777_216, 201_326_592)
    assert (b.frame_min_pixels, b.frame_max_pixels, b.video_max_pixels) == (4_096, 16_777_216, 201_326_592)
    assert (b.fps, b.min_frames, b.max_frames, b.frames_by_pixels) == (1.0, 1, 256, 49_152)


def test_each_file_rules_the_pixels_of_its_own_kind() -> None:
    b = budgets({"min_pixels": 64, "max_pixels": 128}, {"min_pixels": 256, "max_pixels": 512, "fps": 2})
    assert (b.min_pixels, b.max_pixels, b.frame_min_pixels, b.frame_max_pixels) == (64, 128, 256, 512)
    assert b.fps == 2.0
    assert budgets({"min_pixels": 64}) == replace(Budgets(), min_pixels=64)
    assert budgets(None, {"min_pixels": 64}) == replace(Budgets(), frame_min_pixels=64)


def test_pixels_have_the_names_hugging_face_gives_them_too() -> None:
    named = {"size": {"shortest_edge": 64, "longest_edge": 128}}
    assert budgets(named) == budgets({"min_pixels": 64, "max_pixels": 128})
    assert budgets(None, named) == budgets(None, {"min_pixels": 64, "max_pixels": 128})
    assert budgets({**named, "min_pixels": 64}) == budgets(named)
    assert problems({**named, "min_pixels": 65, "max_pixels": 129}) == (
        f"{IMAGES}: min_pixels is 65, size.shortest_edge is 64",
        f"{IMAGES}: max_pixels is 129, size.longest_edge is 128",
    )


@pytest.mark.parametrize("key", ["multi_image_max_pixels", "video_max_pixels", "min_frames", "max_frames", "fps"])
def test_a_budget_with_one_meaning_may_be_in_either_file_and_not_twice_otherwise(key: str) -> None:
    value = 2 if "frames" in key or key == "fps" else 300_000
    for files in (({key: value}, None), (None, {key: value}), ({key: value}, {key: value})):
        assert getattr(budgets(*files), key) == value
    (problem,) = problems({key: value}, {key: value + 1})
    assert problem.startswith(f"{VIDEOS}: {key} is {value + 1}") and str(value) in problem


def test_what_a_whole_file_of_hugging_face_says_is_allowed() -> None:
    data = {
        "crop_size": None,
        "do_center_crop": None,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
        "patch_size": 4,
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"longest_edge": 16_777_216, "shortest_edge": 4_096},
        "temporal_patch_size": 1,
        "image_processor_type": "AnyImageProcessor",
    }
    assert budgets(data, {**data, "do_sample_frames": True}) == Budgets()


REFUSED: dict[str, object] = {
    "resample": 0,
    "do_resize": False,
    "do_normalize": False,
    "do_rescale": False,
    "do_convert_rgb": False,
    "do_sample_frames": False,
    "do_center_crop": True,
    "do_pad": True,
    "rescale_factor": 1.0,
    "image_mean": [0.48, 0.45, 0.4],
    "image_std": [1.0, 1.0, 1.0],
    "patch_size": 14,
    "merge_size": 3,
    "temporal_patch_size": 2,
}


@pytest.mark.parametrize("file", [0, 1], ids=[IMAGES, VIDEOS])
def test_everything_that_would_make_other_pixels_is_refused_at_once(file: int) -> None:
    for key, value in REFUSED.items():
        (problem,) = problems(*[({key: value} if i == file else None) for i in range(2)])
        assert f": {key} " in problem
    found = problems(*[({**REFUSED, "size": {"height": 8, "width": 8}} if i == file else None) for i in range(2)])
    assert len(found) == len(REFUSED) + 2
    assert all(any(f": {key} " in problem for problem in found) for key in REFUSED)


@pytest.mark.parametrize("key", ["fps", "rescale_factor"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0, 10**400, "2", True, [1]])
def test_a_number_is_finite_and_above_zero(key: str, value: object) -> None:
    found = problems(None, {key: value})
    assert found and all(f"{VIDEOS}: {key} is " in problem for problem in found)


COUNTS = ["min_pixels", "max_pixels", "multi_image_max_pixels", "video_max_pixels", "min_frames", "max_frames"]


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2**31, 10**4000, 1.5, math.nan, "8", False, []])
def test_a_count_is_an_integer_within_reason(key: str, value: object) -> None:
    (problem,) = problems({key: value})
    assert problem.startswith(f"{IMAGES}: {key} is ") and len(problem) < 200


@pytest.mark.parametrize("value", [3, [1], {"shortest_edge": "a"}, {"longest_edge": -1}])
def test_a_size_is_an_object_of_counts(value: object) -> None:
    assert problems({"size": value})[0].startswith(f"{IMAGES}: size")


def test_bounds_with_nothing_between_them_are_all_told() -> None:
    found = problems(
        {"min_pixels": 5_000, "max_pixels": 4_000, "multi_image_max_pixels": 3_000, "resample": 2},
        {"min_pixels": 5_000, "max_pixels": 4_000, "video_max_pixels": 3_000, "min_frames": 9, "max_frames": 8},
    )
    assert found[1:] == (
        "min_pixels is 5000, more than max_pixels, 4000",
        "min_pixels is 5000, more than multi_image_max_pixels, 3000",
        "frame_min_pixels is 5000, more than frame_max_pixels, 4000",
        "frame_min_pixels is 5000, more than video_max_pixels, 3000",
        "min_frames is 9, more than max_frames, 8",
    )


def test_frames_and_images_are_sized_by_their_own_bounds() -> None:
    processor = MossVLProcessor(CONFIG, replace(Budgets(), max_pixels=6_400, frame_max_pixels=25_600))
    image, video = processor.size([MediumFacts("image", 400, 400, 1, 0.0, SamplingOptions()), listed(2, side=400)])
    assert (image.height, image.width, video.height, video.width) == (80, 80, 160, 160)


def test_a_video_beside_one_that_takes_the_whole_budget_still_has_a_size() -> None:
    processor = MossVLProcessor(CONFIG, replace(Budgets(), video_max_pixels=4_096))
    small, _ = processor.size([listed(1, side=8), listed(1, side=16_384)])
    assert small.height * small.width == 4_096


# -- frames ------------------------------------------------------------------------------------------------------------


def listed(frames: int, *, side: int = 64) -> MediumFacts:
    return MediumFacts("video", side, side, frames, 0.0, SamplingOptions(every_frame=True))


def named(frames: int, seconds: float = 1.0) -> MediumFacts:
    times = tuple(float(i) for i in range(frames))
    return MediumFacts("video", 64, 64, frames, seconds, SamplingOptions(timestamps=times))


def sampled(seconds: float, **options: Any) -> MediumFacts:
    return MediumFacts("video", 64, 64, math.ceil(seconds * 30), seconds, SamplingOptions(**options))


def units(*media: MediumFacts) -> list[int]:
    return [plan.units for plan in MossVLProcessor(CONFIG, Budgets()).size(media)]


def refused(*media: MediumFacts) -> tuple[str | None, object, object]:
    with pytest.raises(InvalidRequest) as caught:
        units(*media)
    assert caught.value.reason == "TOO_MANY_ITEMS"
    return caught.value.item, caught.value.facts["got"], caught.value.facts["limit"]


def test_named_frames_fill_the_budget_however_short_their_videos_are() -> None:
    assert units(listed(200), named(56)) == [200, 56]
    assert units(named(100, seconds=0.1), sampled(1000.0)) == [100, 156]
    assert units(sampled(1000.0), listed(100), sampled(1000.0)) == [78, 100, 78]


def test_sampled_videos_have_one_frame_each_at_least() -> None:
    assert units(listed(254), sampled(100.0), sampled(100.0)) == [254, 1, 1]
    assert refused(listed(255), sampled(100.0), sampled(100.0)) == ("media[0]", 255, 254)
    assert refused(sampled(9.0), listed(200), named(56)) == ("media[2]", 56, 55)


def test_named_frames_beyond_the_total_are_refused() -> None:
    assert refused(listed(257)) == ("media[0]", 257, 256)
    assert refused(named(200), named(57)) == ("media[1]", 57, 56)
    assert refused(*[sampled(1.0)] * 256, listed(1)) == ("media[256]", 1, 0)
    few = MossVLProcessor(CONFIG, replace(Budgets(), video_max_pixels=8_192))
    with pytest.raises(InvalidRequest) as caught:
        few.size([listed(3)])
    assert caught.value.facts == {"got": 3, "limit": 2}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.builds(listed, st.integers(1, 60))
        | st.builds(named, st.integers(1, 60), st.floats(0.1, 100))
        | st.builds(sampled, st.floats(1, 1000)),
        max_size=6,
    )
)
def test_whatever_is_asked_together_stays_within_the_total(media: list[MediumFacts]) -> None:
    explicit = [i for i, facts in enumerate(media) if facts.options.explicit]
    asked, others = sum(media[i].frames for i in explicit), len(media) - len(explicit)
    if asked and asked + others > 256:
        refused(*media)
        return
    found = units(*media)
    assert sum(found) <= 256 and min(found, default=1) >= 1
    assert all(found[i] == media[i].frames for i in explicit)
    if not explicit:  # the model's own rule, unchanged
        shares = share_frames([facts.seconds for facts in media], 256)
        assert all(got <= share for got, share in zip(found, shares, strict=True))
