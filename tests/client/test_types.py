"""What can be known before anything is sent is refused where the value is made, with the server's reasons."""

from __future__ import annotations

import base64
import inspect
import io
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from chiasm.client import Frames, Image, Message, SamplingParams, Video
from chiasm.errors import InvalidRequest, Unsupported

GREY = np.zeros((4, 5), np.uint8)
NAN = float("nan")
INF = float("inf")


def refused(make: Any, *args: Any, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make(*args, **options)
    return caught.value


@pytest.mark.parametrize("temperature", [NAN, INF, -INF, -0.1, 100.5])
def test_a_temperature_out_of_range_is_refused_with_its_range(temperature: float) -> None:
    error = refused(SamplingParams, temperature=temperature)
    assert error.reason == "FIELD_OUT_OF_RANGE"
    assert (error.facts["field"], error.facts["range"]) == ("temperature", "from 0 to 100")
    assert str(error.facts["value"]) in error.message
    assert str(temperature) in error.message


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31), ("seed", -1), ("seed", 2**64)]
)
def test_whole_numbers_out_of_range_are_refused(field: str, value: int) -> None:
    error = refused(SamplingParams, **{field: value})
    assert (error.reason, error.facts["field"]) == ("FIELD_OUT_OF_RANGE", field)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("top_p", 0.0, "top_p"),
        ("top_p", NAN, "top_p"),
        ("min_p", 1.5, "min_p"),
        ("repetition_penalty", 0.0, "repetition_penalty"),
        ("presence_penalty", 2.5, "presence_penalty"),
        ("frequency_penalty", NAN, "frequency_penalty"),
        ("top_k", -1, "top_k"),
        ("logprobs", 21, "logprobs"),
        ("min_tokens", -1, "min_tokens"),
        ("stop", "", "stop[0]"),
        ("stop", ["a", "é" * 129], "stop[1]"),
        ("stop", ["a"] * 17, "stop"),
        ("logit_bias", {5: NAN}, "logit_bias[5]"),
        ("logit_bias", {5: 1e39}, "logit_bias[5]"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "logit_bias"),
        ("logit_bias", [(5, 1.0), (5, 2.0)], "logit_bias"),
        ("logit_bias", {-1: 1.0}, "logit_bias[0]"),
        ("regex", "a" * 65_537, "regex"),
        ("grammar", "é" * 32_769, "grammar"),
        ("json_schema", {"const": "a" * 65_536}, "json_schema"),
        ("choice", ["a"] * 1025, "choice"),
        ("choice", ["a", ""], "choice[1]"),
        ("choice", ["a" * 40_000, "b" * 40_000], "choice"),
    ],
)
def test_options_of_sampling_out_of_range_are_refused_with_their_name(field: str, value: object, named: str) -> None:
    error = refused(SamplingParams, **{field: value})
    assert (error.reason, error.facts["field"]) == ("FIELD_OUT_OF_RANGE", named)


def test_fewest_tokens_are_no_more_than_the_most() -> None:
    error = refused(SamplingParams, min_tokens=4, max_tokens=3)
    assert (error.reason, error.facts["field"]) == ("FIELD_OUT_OF_RANGE", "min_tokens")


def test_an_answer_has_one_guide() -> None:
    error = refused(SamplingParams, regex="a", choice=["a"])
    assert error.reason == "SAMPLING_CONFLICT" and "regex and choice" in error.message
    assert SamplingParams(choice=[], regex=None) == SamplingParams()


def test_one_stop_string_is_as_good_as_a_sequence() -> None:
    assert SamplingParams(stop="END") == SamplingParams(stop=["END"])


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.int64(7)])
def test_every_seed_of_64_bits_is_taken(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed


@pytest.mark.parametrize(
    ("make", "args", "option", "nearest"),
    [
        (SamplingParams, (), "temprature", "temperature"),
        (Video, (b"x",), "max_frame", "max_frames"),
        (Image, (b"x",), "layuot", "layout"),
        (Frames, ([GREY],), "timestamp", "timestamps"),
        (Message, ("user",), "contents", "content"),
    ],
)
def test_a_misspelt_option_is_refused_with_the_nearest_name(
    make: Any, args: tuple[Any, ...], option: str, nearest: str
) -> None:
    error = refused(make, *args, **{option: 3})
    assert error.reason == "UNKNOWN_FIELD"
    assert error.facts == {"field": option, "nearest": nearest}
    assert option in error.message and nearest in error.message and make.__name__ in error.message


@pytest.mark.parametrize("option", ["n", "guide"])
def test_an_option_that_no_server_takes_yet_is_not_there(option: str) -> None:
    error = refused(SamplingParams, **{option: 1})
    assert (error.reason, error.facts["field"]) == ("UNKNOWN_FIELD", option)
    assert "temperature" in error.message, "it says what is taken"


def test_signatures_are_what_they_were() -> None:
    names = ["source", "fps", "max_frames", "min_frames", "start", "end", "timestamps"]
    assert list(inspect.signature(Video).parameters) == names
    with pytest.raises(TypeError, match="source"):
        Video()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1.5},
        {"seed": "7"},
        {"temperature": "hot"},
        {"temperature": []},
        {"top_k": 2.5},
        {"stop": 3},
        {"stop": [3]},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {5: "much"}},
        {"skip_special_tokens": 1},
        {"regex": 3},
        {"grammar": b"a"},
        {"json_schema": ["a"]},
        {"json_schema": {"a": {1, 2}}},
        {"json_schema": {"a": NAN}},
        {"choice": "abc"},
        {"choice": [3]},
    ],
)
def test_what_is_no_number_or_no_text_is_a_type_error(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        SamplingParams(**options)


def test_values_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().seed = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        Image(b"x").source = b"y"  # type: ignore[misc]


# -- videos and frames -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fps": 0}, "FIELD_OUT_OF_RANGE"),
        ({"fps": -1.0}, "FIELD_OUT_OF_RANGE"),
        ({"fps": NAN}, "FIELD_OUT_OF_RANGE"),
        ({"fps": INF}, "FIELD_OUT_OF_RANGE"),
        ({"fps": 1e9}, "FIELD_OUT_OF_RANGE"),
        ({"max_frames": 0}, "FIELD_OUT_OF_RANGE"),
        ({"min_frames": -3}, "FIELD_OUT_OF_RANGE"),
        ({"start": -0.5}, "FIELD_OUT_OF_RANGE"),
        ({"end": NAN}, "FIELD_OUT_OF_RANGE"),
        ({"min_frames": 4, "max_frames": 3}, "SAMPLING_CONFLICT"),
        ({"start": 2, "end": 2}, "SAMPLING_CONFLICT"),
        ({"timestamps": [0.0], "fps": 1}, "SAMPLING_CONFLICT"),
        ({"timestamps": []}, "SAMPLING_CONFLICT"),
        ({"timestamps": [1.0, 1.0]}, "TIMESTAMPS_INVALID"),
    ],
)
def test_contradictory_or_impossible_sampling_of_a_video_is_refused(options: dict[str, Any], reason: str) -> None:
    assert refused(Video, b"x", **options).reason == reason


def test_fps_and_max_frames_go_together() -> None:
    video = Video(b"x", fps=2, max_frames=64, start=0, end=30.5)
    assert (video.fps, video.max_frames, video.end) == (2, 64, 30.5)


def test_frames_without_times_are_refused() -> None:
    error = refused(Frames, [GREY])
    assert (error.reason, error.facts) == ("FIELD_MISSING", {"field": "timestamps or fps"})


def test_frames_with_two_kinds_of_times_are_refused() -> None:
    assert refused(Frames, [GREY], timestamps=[0.0], fps=1).reason == "SAMPLING_CONFLICT"


def test_frames_and_timestamps_are_equally_many() -> None:
    error = refused(Frames, [GREY, GREY], timestamps=[0.0])
    assert (error.reason, error.facts) == ("TIMESTAMPS_INVALID", {"frames": 2, "timestamps": 1})


@pytest.mark.parametrize(
    ("times", "index"), [([-1.0, 2.0], 0), ([0.0, 0.0], 1), ([1.0, 0.5], 1), ([0.0, NAN], 1), ([0.0, INF], 1)]
)
def test_timestamps_grow_from_zero_and_are_finite(times: list[float], index: int) -> None:
    error = refused(Frames, [GREY, GREY], timestamps=times)
    assert (error.reason, error.facts) == ("TIMESTAMPS_INVALID", {"index": index})


def test_an_absurd_time_and_an_empty_list_are_refused() -> None:
    assert refused(Frames, [GREY], timestamps=[1e12]).reason == "FIELD_OUT_OF_RANGE"
    assert refused(Frames, [], fps=1).reason == "NO_FRAMES"


def test_pictures_are_no_video() -> None:
    for source in (GREY, Pillow.new("RGB", (2, 2))):
        with pytest.raises(TypeError, match="Frames"):
            Video(source)  # type: ignore[arg-type]


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pillow_modes_of_unknown_range_are_refused_with_a_hint(mode: str) -> None:
    error = refused(Image, Pillow.new(mode, (2, 2)))
    assert (error.reason, error.facts) == ("FRAME_LAYOUT", {"mode": mode})
    assert "convert it to L" in error.message


@pytest.mark.parametrize("dtype", ["float32", "float64", ">u2", "int64", "bool"])
def test_arrays_that_are_not_uint8_are_refused(dtype: str) -> None:
    error = refused(Image, np.zeros((4, 5, 3), dtype))
    assert error.reason == "FRAME_LAYOUT"
    assert ("give uint8" in error.message) == dtype.startswith("float")


@pytest.mark.parametrize("shape", [(3, 5, 3), (4, 5, 1), (1, 5, 3), (3, 3, 3)])
def test_an_ambiguous_layout_is_refused_until_it_is_said(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.uint8)
    error = refused(Image, array)
    assert error.reason == "FRAME_LAYOUT"
    assert "layout=" in error.message
    assert Image(array, layout="HWC").layout == "HWC"
    assert Image(array, layout="CHW").layout == "CHW"


@pytest.mark.parametrize("shape", [(9, 5, 2), (5,), (2, 4, 5, 3), (), (7, 8, 9)])
def test_a_shape_that_is_no_picture_is_refused(shape: tuple[int, ...]) -> None:
    assert refused(Image, np.zeros(shape, np.uint8)).reason == "FRAME_LAYOUT"


def test_a_layout_that_does_not_fit_is_refused() -> None:
    assert refused(Image, GREY, layout="HWC").reason == "FRAME_LAYOUT"
    assert refused(Image, np.zeros((8, 9, 3), np.uint8), layout="CHW").reason == "FRAME_LAYOUT"
    assert refused(Image, b"a file", layout="HWC").reason == "FRAME_LAYOUT"


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (0, 5), (3, 0, 9)])
def test_an_array_without_pixels_is_refused(shape: tuple[int, ...]) -> None:
    assert refused(Image, np.zeros(shape, np.uint8)).reason == "FIELD_OUT_OF_RANGE"


@pytest.mark.parametrize("body", ["AAA", "A A=", "§§§§", "AAAA\n"])
def test_broken_base64_is_refused(body: str) -> None:
    error = refused(Image, f"data:image/png;base64,{body}")
    assert (error.reason, error.facts) == ("MEDIA_DECODE_FAILED", {"cause": "base64"})
    assert refused(Video, "data:video/mp4,plain").reason == "MEDIA_DECODE_FAILED"


def test_a_data_uri_is_its_bytes() -> None:
    assert Image("data:image/png;base64," + base64.b64encode(b"abc").decode()).source == b"abc"


def test_addresses_are_not_fetched() -> None:
    with pytest.raises(Unsupported) as caught:
        Image("https://example.org/cat.png")
    assert caught.value.reason == "FEATURE_DISABLED"


def test_a_file_object_is_read_once_and_left_open() -> None:
    file = io.BytesIO(b"bytes of a file")
    assert Image(file).source == b"bytes of a file"
    assert not file.closed
    with pytest.raises(TypeError, match="rb"):
        Image(io.StringIO("text"))  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [None, 3, [b"x"], object()])
def test_what_is_no_medium_is_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError, match="a medium is"):
        Image(source)


def test_a_medium_never_prints_its_bytes() -> None:
    assert repr(Image(b"secret")) == "Image(6 bytes)"
    assert repr(Video("clip.mp4")) == "Video('clip.mp4')"
    assert repr(Image(GREY)) == "Image(array (4, 5))"
    assert repr(Frames([GREY], fps=1)) == "Frames(1 pictures)"


# -- messages ----------------------------------------------------------------------------------------------------------


def test_an_unknown_role_is_refused() -> None:
    error = refused(Message, "robot", "hello")
    assert (error.reason, error.facts["field"]) == ("FIELD_OUT_OF_RANGE", "role")


def test_content_becomes_a_tuple_of_parts() -> None:
    image = Image(b"x")
    assert Message("user", "hello").content == ("hello",)
    assert Message("user", [image, "hello"]).content == (image, "hello")
    assert Message("user", image).content == (image,)


@pytest.mark.parametrize("content", [b"bytes", 7, ["fine", b"bytes"], [GREY], [None]])
def test_content_that_is_neither_text_nor_a_medium_is_a_type_error(content: Any) -> None:
    with pytest.raises(TypeError, match="content"):
        Message("user", content)


@pytest.mark.parametrize("field", ["seed", "max_tokens"])
def test_true_is_no_whole_number(field: str) -> None:
    with pytest.raises(TypeError, match=f"{field} must be a whole number, not True"):
        make: Any = SamplingParams
        make(**{field: True})


def test_whole_numbers_are_kept_as_plain_ints() -> None:
    params = SamplingParams(seed=np.uint64(2**63), max_tokens=np.int32(4))  # type: ignore[arg-type]
    assert (type(params.seed), params.seed, type(params.max_tokens), params.max_tokens) == (int, 2**63, int, 4)
    video = Video(b"x", min_frames=np.int64(2), max_frames=np.int64(3))  # type: ignore[arg-type]
    assert (type(video.min_frames), type(video.max_frames)) == (int, int)
