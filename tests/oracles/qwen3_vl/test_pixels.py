"""Sizes, frames, pixels and patches of all recorded cases and tables: exact numbers.

On purpose this house does otherwise in these places, each of which a test here or in `tests/models` names: times are
the frames' own and not number / rate; RGBA handed over as an array is composited as a picture file is; a request's own
`min_frames` and `max_frames` bind; no frame of a clip is used twice but the last one of an odd number; one frame is a
video.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from chiasm.errors import InvalidRequest
from chiasm.media import video as media
from chiasm.media.patches import resize
from chiasm.media.sample import SamplingOptions
from chiasm.media.types import Limits
from chiasm.models.family import MediumFacts
from tests.media import make
from tests.oracles.qwen3_vl import recorded
from tests.oracles.qwen3_vl.recorded import Case

WITH_IMAGES = recorded.cases("images")
WITH_VIDEOS = recorded.cases("videos")
RGBA_ARRAY = "image_rgba_numpy"
BOUND_BY_THE_CALL = "clip30_max_frames_call"


def named(case: Case) -> str:
    return str(case["name"])


def agree(case: Case, kind: str, got: torch.Tensor) -> None:
    """The rows that are recorded of a case, bit for bit: whole, or some of them by number."""
    said = recorded.tensors()
    assert list(got.shape) == case[f"{kind}_shape"]
    if case["pixel_values_stored"][kind] == "full":
        assert torch.equal(got, said[f"{case['name']}/{kind}"])
    else:
        assert torch.equal(got[said[f"{case['name']}/{kind}_rows"]], said[f"{case['name']}/{kind}_sample"])


def test_every_case_with_media_is_among_those_compared() -> None:
    assert len(recorded.fixtures()["cases"]) == 44
    bare = [case["name"] for case in recorded.cases() if not case["images"] and not case["videos"]]
    assert bare == ["text_only", "text_system_multi_turn"]


@pytest.mark.parametrize("case", WITH_IMAGES, ids=named)
def test_images_are_sized_resized_and_cut_as_recorded(case: Case) -> None:
    processor, _ = recorded.of_case(case)
    pictures = [recorded.picture(case, name) for name in case["images"]]
    plans = processor.size([recorded.still(*picture.shape[-2:]) for picture in pictures])
    assert [[1, *plan.grid] for plan in plans] == case["image_grid_thw"]
    assert all((plan.frames, plan.units, plan.span) == (1, 1, 1) for plan in plans)
    resized = [resize(picture, plan.height, plan.width) for picture, plan in zip(pictures, plans, strict=True)]
    expected = [recorded.tensors()[f"{case['name']}/image_resized_u8/{i}"] for i in range(len(pictures))]
    if case["name"] == RGBA_ARRAY:  # recorded: composited in float32 and cut. Here it is rounded, as picture files are.
        (got,), (said,) = resized, expected
        apart = (got.int() - said.int()).abs()
        assert 0 < apart.max() <= 2
        as_file = recorded.tensors()["image_rgba/image_resized_u8/0"]
        assert (got.int() - as_file.int()).abs().max() <= 1
        return
    for got, said in zip(resized, expected, strict=True):
        assert torch.equal(got, said)
    agree(case, "pixel_values", recorded.rows(resized, processor.config))


@pytest.mark.parametrize("case", WITH_VIDEOS, ids=named)
def test_videos_are_sampled_sized_and_cut_as_recorded(case: Case) -> None:
    processor, options = recorded.of_case(case)
    resized = []
    for i, (name, asked) in enumerate(zip(case["videos"], options, strict=True)):
        clip, said = recorded.clip(name), case["videos_out"][i]
        source = (case["video_metadata_in"] or [{"fps": 24.0}] * (i + 1))[i]
        facts, offsets = recorded.video(len(clip), source["fps"], asked, height=clip.shape[2], width=clip.shape[3])
        (plan,) = processor.size([facts])
        indices = processor.pick(offsets, asked, plan.frames)
        if asked.every_frame:
            assert indices == list(range(len(clip)))
        else:
            assert indices == said["frames_indices"]
            # Of a file with a constant rate the frames' own times are the recorded ones.
            units = [indices[at : at + 2] for at in range(0, len(indices), 2)]
            times = [sum(offsets[index] for index in unit) / len(unit) for unit in units]
            assert times == pytest.approx(said["timestamps_exact"], abs=1e-12)
        assert [plan.units, *plan.grid] == case["video_grid_thw"][i]
        assert plan.tokens == said["tokens_per_temporal_patch"]
        resized.append(resize(clip[indices], plan.height, plan.width))
        assert torch.equal(resized[-1], recorded.tensors()[f"{case['name']}/video_resized_u8/{i}"])
    agree(case, "pixel_values_videos", recorded.rows(resized, processor.config))


def test_a_requests_own_bound_on_frames_binds_where_the_recorded_processor_leaves_it_unread() -> None:
    (case,) = [case for case in WITH_VIDEOS if case["name"] == BOUND_BY_THE_CALL]
    processor, (recorded_as,) = recorded.of_case(case)
    asked = SamplingOptions(fps=recorded_as.fps, max_frames=case["videos_kwargs"]["max_frames"])
    facts, offsets = recorded.video(30, 30.0, asked)
    (plan,) = processor.size([facts])
    assert len(case["videos_out"][0]["frames_indices"]) == 12 and plan.frames == 6
    (as_setting,) = [case for case in WITH_VIDEOS if case["name"] == "clip30_max_frames_init"]
    assert processor.pick(offsets, asked, plan.frames) == as_setting["videos_out"][0]["frames_indices"]


@pytest.mark.parametrize("row", recorded.fixtures()["image_resize_table"], ids=str)
def test_the_table_of_image_sizes(row: dict[str, Any]) -> None:
    size = {"shortest_edge": row["min_pixels"], "longest_edge": row["max_pixels"]}
    (plan,) = recorded.processor(images={"size": size}).size([recorded.still(row["height"], row["width"])])
    assert [plan.height, plan.width] == row["out"]


@pytest.mark.parametrize("row", recorded.fixtures()["video_resize_table"], ids=str)
def test_the_table_of_video_sizes(row: dict[str, Any]) -> None:
    settings = {
        "size": {key: row[key] for key in ("shortest_edge", "longest_edge")},
        "cap_pixels_per_frame": row["cap_pixels_per_frame"],
        "max_video_tokens": row["max_video_tokens"],
    }
    listed = SamplingOptions(every_frame=True)
    facts, _ = recorded.video(row["frames"], 1.0, listed, height=row["height"], width=row["width"])
    (plan,) = recorded.processor(videos=settings).size([facts])
    assert [plan.height, plan.width] == row["out"]
    assert [plan.units, *plan.grid] == row["grid_thw"]


@pytest.mark.parametrize("row", recorded.fixtures()["frame_sampling_table"], ids=lambda row: str(row["indices"][:9]))
def test_the_table_of_sampled_frames(row: dict[str, Any]) -> None:
    """A number of frames is asked for by its two bounds. A source without a rate counts as 24 a second there; here a
    file always has times."""
    bounds = {key: row[key] for key in ("min_frames", "max_frames")}
    number = row["num_frames"]
    asked = SamplingOptions(fps=row["fps"], min_frames=number, max_frames=number)
    facts, offsets = recorded.video(row["total_num_frames"], row["source_fps"] or 24.0, asked)
    processor = recorded.processor(videos=bounds)
    (plan,) = processor.size([facts])
    indices = processor.pick(offsets, asked, plan.frames)
    assert indices == row["indices"]
    units = [indices[at : at + 2] for at in range(0, len(indices), 2)]
    stamps = [f"{sum(offsets[index] for index in unit) / len(unit):.1f}" for unit in units]
    assert stamps == row["timestamps"]


@pytest.mark.parametrize(
    "row", [row for row in recorded.fixtures()["frame_sampling_table"] if row["total_num_frames"] <= 301 and row["fps"]]
)
def test_a_real_file_gives_the_frames_of_the_table(row: dict[str, Any]) -> None:
    """Its rate is read from presentation times, not from what the container claims."""
    rate = Fraction(row["source_fps"] or 24.0).limit_denominator(1_000)
    data = make.video(make.steps(row["total_num_frames"]), time_base=1 / rate)
    probed = media.probe(data, "mov,mp4", Limits())
    asked = SamplingOptions(fps=row["fps"])
    processor = recorded.processor(videos={key: row[key] for key in ("min_frames", "max_frames")})
    (plan,) = processor.size([MediumFacts.of(probed, asked)])
    assert processor.pick(probed.frame_offsets, asked, plan.frames) == row["indices"]


def test_the_rate_of_the_files_is_what_no_option_means() -> None:
    facts, _ = recorded.video(300, 30.0, SamplingOptions())
    asked, _ = recorded.video(300, 30.0, SamplingOptions(fps=2.0))
    plans = recorded.processor().size([facts, asked])
    assert [plan.frames for plan in plans] == [20, 20]


def test_what_is_recorded_as_an_error_of_sizes_is_one_and_one_frame_is_not() -> None:
    said = [error["what"] for error in recorded.fixtures()["errors"]]
    assert {"image of aspect ratio above 200 (1x201)", "video of one frame"} <= set(said)
    processor = recorded.processor()
    with pytest.raises(InvalidRequest) as caught:
        processor.size([recorded.still(64, 64), recorded.still(1, 201)])
    assert (caught.value.reason, caught.value.item) == ("ASPECT_RATIO", "media[1]")
    assert caught.value.facts == {"ratio": 201.0, "limit": 200}
    # Here it is shown twice, as the last of an odd number is, and sized as the two frames that it becomes.
    one, _ = recorded.video(1, 1.0, SamplingOptions())
    two, _ = recorded.video(2, 1.0, SamplingOptions())
    single, double = processor.size([one, two])
    assert (single.frames, single.units, single.grid) == (1, 1, double.grid)
