"""Options of sampling that contradict each other are refused, whichever two they are."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from chiasm.errors import InvalidRequest
from chiasm.media.sample import SamplingOptions, share_frames
from chiasm.media.types import Probed
from chiasm.models.family import MediumFacts

EVERY: dict[str, Any] = {
    "fps": 2.0,
    "min_frames": 1,
    "max_frames": 4,
    "start": 0.0,
    "end": 1.0,
    "timestamps": (0.0, 0.5),
}


def refused(**options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        SamplingOptions(**options).check()
    return caught.value.reason


@pytest.mark.parametrize("name", EVERY)
def test_an_option_alone_is_fine_and_with_a_list_of_frames_it_is_not(name: str) -> None:
    SamplingOptions(**{name: EVERY[name]}).check()
    assert refused(every_frame=True, **{name: EVERY[name]}) == "SAMPLING_CONFLICT"


@pytest.mark.parametrize("names", list(combinations(EVERY, 2)), ids="-".join)
def test_named_times_exclude_the_rest_and_the_rest_may_stand_together(names: tuple[str, str]) -> None:
    options = {name: EVERY[name] for name in names}
    if "timestamps" in names:
        assert refused(**options) == "SAMPLING_CONFLICT"
    else:
        SamplingOptions(**options).check()
    assert refused(every_frame=True, **options) == "SAMPLING_CONFLICT"


def test_a_list_of_frames_is_checked_where_a_medium_is_opened() -> None:
    probed = Probed(kind="video", found="frames", height=32, width=32, frame_offsets=(0.0, 1.0), duration=2.0)
    assert MediumFacts.of(probed, SamplingOptions(every_frame=True)).frames == 2
    with pytest.raises(InvalidRequest, match="SAMPLING_CONFLICT"):
        MediumFacts.of(probed, SamplingOptions(every_frame=True, fps=1.0))


def test_a_request_names_its_frames_with_a_list_or_with_times() -> None:
    assert SamplingOptions(every_frame=True).explicit and SamplingOptions(timestamps=(0.0,)).explicit
    assert not SamplingOptions(fps=1.0, start=0.0).explicit


@pytest.mark.parametrize(
    ("durations", "total", "shares"),
    [
        ([], 8, []),
        ([5.0], 8, [8]),
        ([1.0, 1.0, 1.0], 2, [1, 1, 1]),
        ([1.0, 1.0], 5, [3, 2]),
        ([0.0, 0.0], 4, [2, 2]),
        ([9.0, 1.0], 12, [10, 2]),
    ],
)
def test_frames_are_shared_by_duration_one_each_at_least(durations: list[float], total: int, shares: list[int]) -> None:
    assert share_frames(durations, total) == shares
