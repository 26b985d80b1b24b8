"""Qwen3-VL's processor files are read whole or refused; every medium is sized by itself; what a request says of a
video's frames is done. The recorded numbers are compared in `tests/oracles/qwen3_vl`."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.media.sample import SamplingOptions
from chiasm.media.types import Probed
from chiasm.models.family import MediumFacts, MediumPlan
from chiasm.models.processor_files import IMAGE_FILE, VIDEO_FILE
from chiasm.models.qwen3_vl.budgets import Budgets
from chiasm.models.qwen3_vl.processing import Qwen3VLProcessor, evenly, resize_video
from chiasm.models.sizing import nearest
from tests.oracles.qwen3_vl.recorded import config, processor, still, video

CONFIG = config()
Data = dict[str, Any]


def budgets(images: Data | None = None, videos: Data | None = None) -> Budgets:
    files = {name: data for name, data in ((IMAGE_FILE, images), (VIDEO_FILE, videos)) if data is not None}
    return Qwen3VLProcessor.read(CONFIG, files, "tiny").budgets


def problems(images: Data | None = None, videos: Data | None = None) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        budgets(images, videos)
    assert caught.value.where == "tiny"
    return caught.value.problems


# -- files -------------------------------------------------------------------------------------------------------------


def test_without_files_the_classes_own_budgets_hold() -> None:
    b = budgets()
    assert b == Budgets()
    assert (b.min_pixels, b.max_pixels) == (56 * 56, 28 * 28 * 1280)
    assert (b.video_min_pixels, b.video_max_pixels) == (128 * 32 * 32, 768 * 32 * 32)
    assert (b.fps, b.min_frames, b.max_frames) == (2.0, 4, 768)
    assert (b.cap_pixels_per_frame, b.max_video_tokens) == (False, 768)


def test_the_recorded_files_are_read() -> None:
    b = processor().budgets
    assert (b.min_pixels, b.max_pixels) == (4_096, 1_048_576)
    assert (b.video_min_pixels, b.video_max_pixels) == (4_096, 4_194_304)
    assert (b.fps, b.min_frames, b.max_frames) == (2.0, 4, 64)


def test_each_file_rules_its_own_kind_and_the_one_of_images_both_where_it_is_alone() -> None:
    images, videos = ({"size": {"shortest_edge": n, "longest_edge": 2 * n}} for n in (5_000, 9_000))
    both = budgets(images, videos)
    assert (both.min_pixels, both.max_pixels) == (5_000, 10_000)
    assert (both.video_min_pixels, both.video_max_pixels) == (9_000, 18_000)
    alone = budgets(images)
    assert (alone.min_pixels, alone.max_pixels) == (alone.video_min_pixels, alone.video_max_pixels) == (5_000, 10_000)
    assert budgets(None, videos) == replace(Budgets(), video_min_pixels=9_000, video_max_pixels=18_000)
    assert budgets({"fps": 9, "max_frames": 9}, videos).fps == 2.0


def test_settings_of_videos_are_read() -> None:
    said = {"fps": 1.5, "min_frames": 2, "max_frames": 10, "max_video_tokens": 4, "cap_pixels_per_frame": True}
    b = budgets(None, said)
    assert {key: getattr(b, key) for key in said} == said
    assert budgets(None, dict.fromkeys(said)) == Budgets()


def test_images_have_older_names_for_pixels_and_videos_have_none() -> None:
    older = {"min_pixels": 5_000, "max_pixels": 10_000}
    assert (budgets(older, {}).min_pixels, budgets(older, {}).max_pixels) == (5_000, 10_000)
    assert problems(None, older) == (
        f"{VIDEO_FILE}: min_pixels is given and size.shortest_edge is not, which is what rules videos",
        f"{VIDEO_FILE}: max_pixels is given and size.longest_edge is not, which is what rules videos",
    )
    assert budgets(None, {**older, "size": {"shortest_edge": 5_000, "longest_edge": 10_000}}).video_max_pixels == 10_000
    (one,) = problems({**older, "size": {"shortest_edge": 5_001}}, {})
    assert one == f"{IMAGE_FILE}: min_pixels is 5000, size.shortest_edge is 5001"


REFUSED: Data = {
    "resample": 2,
    "do_resize": False,
    "do_normalize": False,
    "do_rescale": False,
    "do_convert_rgb": False,
    "do_sample_frames": False,
    "do_center_crop": True,
    "do_pad": True,
    "rescale_factor": 1.0,
    "image_mean": [0.48, 0.45, 0.4],
    "image_std": [0.26, 0.26, 0.27],
    "patch_size": 14,
    "merge_size": 3,
    "temporal_patch_size": 1,
}


@pytest.mark.parametrize("file", [0, 1], ids=[IMAGE_FILE, VIDEO_FILE])
def test_everything_that_would_make_other_pixels_is_refused_at_once(file: int) -> None:
    for key, value in REFUSED.items():
        (problem,) = problems(*[({key: value} if i == file else {}) for i in range(2)])
        assert f": {key} " in problem
    sides = {"size": {"height": 8, "width": 8}}
    found = problems(*[({**REFUSED, **sides} if i == file else {}) for i in range(2)])
    assert len(found) == len(REFUSED) + 2
    assert all(any(f": {key} " in problem for problem in found) for key in REFUSED)


@pytest.mark.parametrize(
    ("key", "value"), [("num_frames", 8), ("cap_pixels_per_frame", 1), ("cap_pixels_per_frame", "on")]
)
def test_what_no_processor_of_videos_can_go_by_is_refused(key: str, value: object) -> None:
    (problem,) = problems(None, {key: value})
    assert problem.startswith(f"{VIDEO_FILE}: {key} ")


COUNTS = ["min_frames", "max_frames", "max_video_tokens"]


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2**31, 10**4000, 1.5, math.nan, "8", False, []])
def test_a_count_is_an_integer_within_reason(key: str, value: object) -> None:
    (problem,) = problems(None, {key: value})
    assert problem.startswith(f"{VIDEO_FILE}: {key} is ") and len(problem) < 200


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0, 10**400, "2", True, [1]])
def test_a_rate_is_finite_and_above_zero(value: object) -> None:
    found = problems(None, {"fps": value})
    assert found and all(f"{VIDEO_FILE}: fps is " in problem for problem in found)


def test_bounds_with_nothing_between_them_are_all_told() -> None:
    sizes = {"size": {"shortest_edge": 5_000, "longest_edge": 4_000}}
    assert problems(sizes, {**sizes, "min_frames": 9, "max_frames": 8}) == (
        "min_pixels is 5000, more than max_pixels, 4000",
        "video_min_pixels is 5000, more than video_max_pixels, 4000",
        "min_frames is 9, more than max_frames, 8",
    )


def test_everything_that_changes_an_entry_is_described() -> None:
    said = json.loads(processor().describe())
    assert said["temporal_patch_size"] == 2 and said["align_corners"] is True
    assert said["resize"] == "torch uint8 bicubic antialias" and said["normalise"] == "(x-127.5)/127.5"
    other = replace(CONFIG, vision=replace(CONFIG.vision, align_corners=False))
    assert Qwen3VLProcessor(other, Budgets()).describe() != processor().describe()


# -- sizes -------------------------------------------------------------------------------------------------------------


LISTED = SamplingOptions(every_frame=True)


def listed(frames: int, height: int = 64, width: int = 64) -> MediumFacts:
    return video(frames, 1.0, LISTED, height=height, width=width)[0]


def sized(*media: MediumFacts) -> list[MediumPlan]:
    return processor().size(media)


def test_what_else_a_request_holds_changes_no_size() -> None:
    media = [still(3000, 2000), listed(64, 720, 1280), still(40, 56), listed(3), listed(2, 1080, 1920)]
    assert sized(*media) == [plan for facts in media for plan in sized(facts)]


def test_more_frames_make_the_same_frame_another_size() -> None:
    few, many = sized(listed(4, 1080, 1920), listed(64, 1080, 1920))
    assert few.height * few.width > many.height * many.width


def test_a_side_that_rounds_to_nothing_shrinks_a_long_picture_as_recorded() -> None:
    (plan,) = sized(still(16, 1600))
    assert plan.width < 1600 and plan.height == 32


def test_a_video_with_a_short_side_is_enlarged_first() -> None:
    """Both sides, by the same; an image of that shape goes to the multiples nearest to its sides."""
    image, clip = sized(still(20, 400), listed(2, 20, 400))
    assert (image.height, image.width) == (32, 384)
    assert (clip.height, clip.width) == (32, 640)
    assert clip.upscaled


def test_sides_too_far_apart_are_refused_by_item_with_both_numbers() -> None:
    for facts in (still(1, 201), listed(2, 1, 201), still(201, 1)):
        with pytest.raises(InvalidRequest) as caught:
            sized(still(64, 64), facts)
        assert (caught.value.reason, caught.value.item) == ("ASPECT_RATIO", "media[1]")
        assert caught.value.facts == {"ratio": 201.0, "limit": 200}
    assert [plan.height for plan in sized(still(1, 200), listed(2, 1, 200))] == [32, 32]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_an_image_is_within_its_budget_whatever_its_size(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidRequest):
            sized(still(height, width))
        return
    (plan,) = sized(still(height, width))
    assert plan.height % 32 == 0 == plan.width % 32
    assert 4_096 <= plan.height * plan.width <= 1_048_576
    assert plan.grid == (plan.height // 16, plan.width // 16)
    assert plan.tokens * 1_024 == plan.height * plan.width
    assert (plan.frames, plan.span, plan.units) == (1, 1, 1)


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 100),
    st.integers(32, 4_000),
    st.integers(32, 4_000),
    st.integers(1_024, 200_000),
    st.integers(1, 500),
)
def test_all_frames_together_are_within_a_videos_bounds(
    frames: int, height: int, width: int, least: int, times: int
) -> None:
    """The ceiling gives way where a side cannot be shorter. What the two frames of every unit hold decides whether a
    size is changed, and the true number of frames how much."""
    h, w = resize_video(frames, height, width, 32, span=2, least=least, most=least * times)
    assert h % 32 == 0 == w % 32 and min(h, w) >= 32
    as_it_is = nearest(height, width, 32)
    shown = max(frames, 2)
    compared = round(shown / 2) * 2 * math.prod(as_it_is)
    if compared > least * times:
        assert shown * h * w <= least * times or 32 in (h, w)
    elif compared < least:
        assert shown * h * w >= least
        assert shown * (h - 32) * (w - 32) < least, "and not by a multiple more than it takes"
    else:
        assert (h, w) == as_it_is


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 300), st.integers(32, 4_000), st.integers(32, 4_000))
def test_more_frames_never_make_larger_ones_once_they_are_shrunk(frames: int, height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    most = 4_096 * 64
    if frames // 2 * 2 * height * width < 4 * most:
        return
    first, second = (resize_video(n, height, width, 32, span=2, least=4_096, most=most) for n in (frames, frames + 1))
    assert second[0] <= first[0] and second[1] <= first[1]


def test_the_cap_bounds_each_frame_and_may_raise_the_whole() -> None:
    def size_of(frames: int, **settings: object) -> tuple[int, int]:
        (plan,) = processor(videos=settings).size([listed(frames, 1080, 1920)])
        return plan.height, plan.width

    free, capped = size_of(2), size_of(2, cap_pixels_per_frame=True)
    assert math.prod(capped) <= 768 * 32 * 32 < math.prod(free)
    small = {"shortest_edge": 12_288, "longest_edge": 24_576}
    assert math.prod(size_of(6, size=small, cap_pixels_per_frame=True)) > math.prod(size_of(6, size=small))


# -- frames ------------------------------------------------------------------------------------------------------------


def frames_of(total: int, rate: float, **options: Any) -> list[int]:
    facts, offsets = video(total, rate, asked := SamplingOptions(**options))
    (plan,) = sized(facts)
    assert plan.span == 2 and plan.units == math.ceil(plan.frames / 2)
    found = processor().pick(offsets, asked, plan.frames)
    assert len(found) == plan.frames
    return found


def test_a_request_says_how_many_frames_it_wants() -> None:
    assert len(frames_of(300, 30.0)) == 20
    assert len(frames_of(300, 30.0, fps=3.0)) == 30
    assert len(frames_of(300, 30.0, fps=0.1)) == 4, "the processor's own least number"
    assert len(frames_of(300, 30.0, fps=0.1, min_frames=1)) == 1
    assert len(frames_of(300, 30.0, max_frames=7)) == 7
    assert len(frames_of(300, 30.0, max_frames=2)) == 2, "the request's most comes before the processor's least"
    assert len(frames_of(300, 30.0, min_frames=33)) == 33
    assert len(frames_of(300, 30.0, fps=1000.0)) == 64
    assert len(frames_of(3, 30.0, min_frames=9)) == 3, "no frame is used twice"


@pytest.mark.parametrize(
    ("field", "options"),
    [("min_frames", SamplingOptions(min_frames=65)), ("max_frames", SamplingOptions(max_frames=65))],
)
def test_more_frames_than_the_processor_samples_are_refused_with_both_numbers(
    field: str, options: SamplingOptions
) -> None:
    facts, _ = video(300, 30.0, options)
    with pytest.raises(InvalidRequest) as caught:
        sized(still(64, 64), facts)
    assert (caught.value.reason, caught.value.item) == ("FIELD_OUT_OF_RANGE", "media[1]")
    assert caught.value.facts == {"field": field, "got": 65, "limit": 64}


def test_a_range_is_sampled_like_a_file_of_its_own() -> None:
    assert frames_of(300, 30.0, start=2.0, end=4.0) == [60 + i for i in (0, 20, 39, 59)]
    assert frames_of(300, 30.0, start=2.0, end=4.0, fps=3.0) == [60 + i for i in (0, 12, 24, 35, 47, 59)]
    assert frames_of(300, 30.0, start=0.0) == frames_of(300, 30.0)
    assert frames_of(30, 10.0, start=2.9) == [29]


def test_frames_that_are_named_are_used_as_they_are() -> None:
    assert frames_of(30, 10.0, timestamps=(0.0, 0.55, 2.0)) == [0, 5, 20]
    assert frames_of(30, 10.0, timestamps=(1.0,)) == [10]
    assert frames_of(5, 10.0, every_frame=True) == [0, 1, 2, 3, 4]
    assert frames_of(100, 10.0, every_frame=True) == list(range(100)), "beyond what is sampled at most, too"


def test_a_lone_frame_is_sized_as_the_two_that_are_shown_of_it() -> None:
    for height, width in ((64, 64), (1080, 1920), (20, 30)):
        one, two = sized(listed(1, height, width), listed(2, height, width))
        assert (one.frames, one.units) == (1, 1) and two.units == 1
        assert (one.height, one.width, one.tokens) == (two.height, two.width, two.tokens)


def test_times_of_a_file_that_are_not_exact_lose_no_frame() -> None:
    """Three seconds in steps that no float holds: the rate is counted from the file's clock, which is forgiven a
    millionth of a frame."""
    offsets = tuple(i / 30 for i in range(90))
    probed = Probed("video", 64, 64, offsets, math.nextafter(3.0, 0.0), "mov,mp4")
    (plan,) = sized(MediumFacts.of(probed, SamplingOptions(fps=3.0)))
    assert plan.frames == 9


@settings(deadline=None)
@given(st.data())
def test_frames_are_spread_evenly_and_none_is_used_twice(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 5_000))
    count = data.draw(st.integers(1, total))
    found = evenly(total, count)
    assert len(found) == count and found[0] == 0
    assert count == 1 or found[-1] == total - 1
    steps = np.diff(found)
    assert not len(steps) or (steps.min() >= 1 and steps.max() - steps.min() <= 2)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 500), st.floats(0.5, 120), st.floats(0.1, 60), st.floats(0.1, 60))
def test_a_higher_rate_never_takes_fewer_frames(total: int, source: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    fewer, more = (frames_of(total, source, fps=fps) for fps in (low, high))
    assert min(4, total) <= len(fewer) <= len(more) <= 64


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(2, 2), (4, 6), (6, 4), (2, 40)])
def test_a_unit_has_a_placeholder_for_each_of_its_tokens_where_its_keys_are(grid: tuple[int, int]) -> None:
    layout, steps = processor().unit_layout(grid), processor().key_steps(grid)
    rows, columns = grid[0] // 2, grid[1] // 2
    assert list(layout.placeholder_ids) == [CONFIG.image_token_id] * (rows * columns)
    assert layout.vision_tokens == rows * columns and layout.advance == max(rows, columns)
    assert steps.shape == (3, rows * columns) and steps.dtype == np.int64
    assert steps.tolist() == layout.placeholder_steps.tolist()
    assert steps[:, -1].tolist() == [0, rows - 1, columns - 1]


def test_the_layout_of_the_largest_image_takes_sixteen_bytes_a_token() -> None:
    tracemalloc.start()
    layout = processor().unit_layout((254, 258))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert layout.vision_tokens == 127 * 129
    assert taken < 17 * layout.vision_tokens


def test_equal_grids_share_one_layout() -> None:
    assert processor().unit_layout((4, 6)) is processor().unit_layout((4, 6))
