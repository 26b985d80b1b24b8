"""The wire's words for every kind of medium and option."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from chiasm.client import (
    Frames,
    Image,
    Message,
    SamplingParams,
    Video,
)
from chiasm.client.convert import to_generate
from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import MEDIA_BYTES
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.media.make import exif, png, save, scene


def request_of(*content: Any, **options: Any) -> rpb.GenerateRequest:
    return to_generate("m", (Message("user", content),), request_id="r", **options).request


def medium_of(medium: Image | Video | Frames) -> pb.Media:
    """The medium as a server reads it: serialised and parsed."""
    (sent,) = rpb.GenerateRequest.FromString(request_of(medium, "?").SerializeToString()).media
    return sent


def pixels_of(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Pillow.open(io.BytesIO(data)))


# -- requests ----------------------------------------------------------------------------------------------------------


def test_turns_parts_and_slots_keep_their_order() -> None:
    messages = [
        Message("system", "Be short."),
        Message("user", [Image(b"first"), "and", Video(b"second")]),
        Message("assistant", "Yes."),
        Message("user", ["more", Image(b"third")]),
    ]
    request = to_generate("m", tuple(messages), request_id="r").request
    turns = request.prompt.conversation.turns
    assert [turn.role for turn in turns] == [pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_USER]
    parts = [[p.text if p.WhichOneof("content") == "text" else p.slot for p in turn.parts] for turn in turns]
    assert parts == [["Be short."], [0, "and", 1], ["Yes."], ["more", 2]]
    assert [medium.data for medium in request.media] == [b"first", b"second", b"third"]
    assert (request.model, request.request_id) == ("m", "r")


def test_unset_options_are_not_sent_and_zeros_are() -> None:
    assert not request_of("?").sampling.ListFields()
    sent = request_of("?", sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=9)).sampling
    assert sent.HasField("temperature")
    assert sent.HasField("seed")
    assert (sent.temperature, sent.seed, sent.max_tokens) == (0.0, 0, 9)
    assert request_of("?", sampling=SamplingParams(max_tokens=9), max_tokens=5).sampling.max_tokens == 5
    assert request_of("?", sampling=SamplingParams(seed=2**64 - 1)).sampling.seed == 2**64 - 1


def test_every_option_of_sampling_reaches_the_wire() -> None:
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={7: 1.5, 9: -2},
        logprobs=4,
        seed=8,
        max_tokens=20,
        min_tokens=2,
        stop=["a", "bc"],
        stop_token_ids=[1],
        banned_token_ids=[2],
        ignore_eos=True,
        skip_special_tokens=False,
    )
    sent = request_of("?", sampling=sampling).sampling
    assert sent == pb.SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=[pb.LogitBias(token_id=7, bias=1.5), pb.LogitBias(token_id=9, bias=-2)],
        logprobs=4,
        seed=8,
        max_tokens=20,
        min_tokens=2,
        stop=["a", "bc"],
        stop_token_ids=[1],
        banned_token_ids=[2],
        ignore_eos=True,
        skip_special_tokens=False,
    )
    left_out = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} - {
        field.name for field, _ in sent.ListFields()
    }
    assert left_out == {"n", "guide"}, "a guide is four options here"
    assert hash(sampling) == hash(replace(sampling, stop=("a", "bc")))


@pytest.mark.parametrize(
    ("option", "guide"),
    [
        ({"json_schema": {"type": "string", "const": "é"}}, pb.Guide(json_schema='{"type": "string", "const": "é"}')),
        ({"json_schema": "{}"}, pb.Guide(json_schema="{}")),
        ({"regex": "a+"}, pb.Guide(regex="a+")),
        ({"grammar": 'root ::= "a"'}, pb.Guide(grammar='root ::= "a"')),
        ({"choice": ["a", "bc"]}, pb.Guide(choice=pb.Choices(choices=["a", "bc"]))),
    ],
)
def test_a_guide_reaches_the_wire(option: dict[str, Any], guide: pb.Guide) -> None:
    sampling = SamplingParams(**option)
    assert request_of("?", sampling=sampling).sampling == pb.SamplingParams(guide=guide)
    assert hash(sampling) == hash(SamplingParams(**option))


@pytest.mark.parametrize("option", [{"regex": "\ud800"}, {"choice": ["a", "\ud800"]}, {"json_schema": {"a": "\ud800"}}])
def test_half_of_a_surrogate_pair_in_a_guide_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of("?", sampling=SamplingParams(**option))
    assert (caught.value.reason, caught.value.item) == ("MALFORMED_REQUEST", next(iter(option)))


def test_fewest_tokens_are_no_more_than_the_most_of_the_call() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens is 4, must be at most max_tokens"):
        request_of("?", sampling=SamplingParams(min_tokens=4), max_tokens=3)


def test_half_of_a_surrogate_pair_in_a_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of("?", sampling=SamplingParams(stop="\ud800"))
    assert (caught.value.reason, caught.value.item) == ("MALFORMED_REQUEST", "stop")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, io.BytesIO])
def test_bytes_of_every_kind_are_sent_as_they_are(kind: Any) -> None:
    sent = medium_of(Image(kind(b"\x00\xff file")))
    assert (sent.kind, sent.data) == (pb.MEDIA_KIND_IMAGE, b"\x00\xff file")
    sent = medium_of(Video(kind(b"clip")))
    assert (sent.kind, sent.data, sent.HasField("sampling")) == (pb.MEDIA_KIND_VIDEO, b"clip", False)


def test_a_path_is_read_when_the_request_is_made(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    video = Video(str(path))
    with pytest.raises(FileNotFoundError):
        medium_of(video)
    path.write_bytes(b"later")
    assert medium_of(video).data == b"later"


def test_an_array_is_sent_raw_rows_from_the_top_channels_last() -> None:
    picture = scene(6, 9)
    (frame,) = medium_of(Image(picture)).frames.frames
    raw = frame.header.raw
    assert (raw.size.height, raw.size.width, raw.channels) == (6, 9, 3)
    assert frame.data == picture.tobytes()
    assert not frame.header.HasField("frame_offset")


def test_flipped_strided_and_channel_first_arrays_are_copied_into_order() -> None:
    picture = scene(6, 9)
    flipped = picture[::-1, ::-1]
    assert not flipped.flags.c_contiguous
    golden = b"".join(bytes(picture[5 - y, 8 - x]) for y in range(6) for x in range(9))
    assert medium_of(Image(flipped)).frames.frames[0].data == golden
    assert medium_of(Image(picture[1:, ::2])).frames.frames[0].data == picture[1:, ::2].copy().tobytes()
    assert medium_of(Image(picture.transpose(2, 0, 1))).frames.frames[0].data == picture.tobytes()
    assert medium_of(Image(np.asfortranarray(picture))).frames.frames[0].data == picture.tobytes()


def test_grey_and_rgba_arrays_say_their_channels() -> None:
    assert medium_of(Image(np.zeros((6, 9), np.uint8))).frames.frames[0].header.raw.channels == 1
    assert medium_of(Image(np.zeros((6, 9, 4), np.uint8))).frames.frames[0].header.raw.channels == 4


def test_anything_numpy_can_read_is_an_array() -> None:
    class Tensor:
        def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
            return scene(6, 9)

    assert medium_of(Image(Tensor())).frames.frames[0].data == scene(6, 9).tobytes()


def test_a_pillow_image_is_sent_as_png_as_it_is_shown() -> None:
    picture = scene(6, 9)
    assert np.array_equal(pixels_of(medium_of(Image(Pillow.fromarray(picture))).data), picture)
    turned = Pillow.open(io.BytesIO(save(Pillow.fromarray(picture), "PNG", exif=exif(6))))
    turned.load()
    assert np.array_equal(pixels_of(medium_of(Image(turned)).data), np.rot90(picture, -1))


def test_a_pillow_image_that_still_has_its_file_is_sent_as_that_file() -> None:
    data = save(scene(16, 24), "JPEG", exif=exif(6))
    untouched = Pillow.open(io.BytesIO(data))
    assert medium_of(Image(untouched)).data == data
    assert medium_of(Image(untouched)).data == data, "asking does not use it up"
    untouched.putpixel((0, 0), (255, 0, 0))
    drawn = medium_of(Image(untouched)).data
    assert drawn.startswith(b"\x89PNG")


def test_a_pillow_image_opened_smaller_than_its_file_is_not_sent_as_that_file() -> None:
    draft = Pillow.open(io.BytesIO(save(scene(64, 64), "JPEG")))
    draft.draft("RGB", (16, 16))
    assert pixels_of(medium_of(Image(draft)).data).shape == (16, 16, 3)


def test_the_shown_picture_of_an_animation_is_sent() -> None:
    frames = [Pillow.fromarray(scene(8, 8, shift)) for shift in (0, 90)]
    animation = Pillow.open(io.BytesIO(save(frames[0], "PNG", save_all=True, append_images=frames[1:])))
    animation.seek(1)
    assert np.array_equal(pixels_of(medium_of(Image(animation)).data), scene(8, 8, 90))


def test_16_bit_grey_is_shifted_not_saturated() -> None:
    values = np.array([[0, 256, 4096, 65535]], np.uint16)
    little = Pillow.fromarray(values)
    assert little.mode == "I;16"
    big = Pillow.frombytes("I;16B", (4, 1), values.astype(">u2").tobytes())
    for image in (little, big):
        assert pixels_of(medium_of(Image(image)).data).tolist() == [[0, 1, 16, 255]]


def every_mode() -> list[Pillow.Image]:
    rgb = Pillow.new("RGB", (5, 4), (200, 100, 50))
    from_rgb = [rgb.convert(mode) for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "RGBX")]
    made = [Pillow.new(mode, (5, 4)) for mode in ("LA", "PA", "LAB")]
    return [*from_rgb, *made, rgb.convert("RGBA").convert("RGBa")]


@pytest.mark.parametrize("image", every_mode(), ids=lambda image: image.mode)
def test_every_other_mode_of_pillow_is_sent(image: Pillow.Image) -> None:
    sent = Pillow.open(io.BytesIO(medium_of(Image(image)).data))
    assert sent.size == (5, 4)
    if image.mode not in ("1", "P", "LA", "PA", "LAB"):
        expected = [124] * 3 if image.mode == "L" else [200, 100, 50]
        near = np.abs(np.asarray(sent.convert("RGB"), np.int16)[0, 0] - expected)
        assert near.max() <= 2


def test_a_damaged_pillow_image_is_refused() -> None:
    data = save(scene(256, 256), "JPEG")
    damaged = Pillow.open(io.BytesIO(data[:-40]))
    damaged.format = None  # as if its file were gone
    with pytest.raises(InvalidRequest) as caught:
        medium_of(Image(damaged))
    assert (caught.value.reason, caught.value.item) == ("MEDIA_DECODE_FAILED", "messages[0].content[0]")


def test_sampling_of_a_video_is_sent() -> None:
    sent = medium_of(Video(b"x", fps=2.5, min_frames=2, max_frames=8, start=0.0, end=1.1)).sampling
    assert (sent.fps, sent.min_frames, sent.max_frames) == (2.5, 2, 8)
    assert sent.HasField("start_offset")
    assert (to_seconds(sent.start_offset), to_seconds(sent.end_offset)) == (0.0, 1.1)
    exact = medium_of(Video(b"x", timestamps=[0, 0.04, 3600.5])).sampling
    assert [to_seconds(offset) for offset in exact.exact_offsets] == [0.0, 0.04, 3600.5]


def test_frames_are_sent_with_their_times() -> None:
    picture = scene(6, 9)
    file = save(picture)
    sent = medium_of(Frames([picture, Image(picture)], timestamps=[0.5, 4.25]))
    assert sent.kind == pb.MEDIA_KIND_VIDEO
    assert [to_seconds(frame.header.frame_offset) for frame in sent.frames.frames] == [0.5, 4.25]
    assert [frame.data for frame in sent.frames.frames] == [picture.tobytes()] * 2
    assert not sent.frames.HasField("fps")
    rated = medium_of(Frames([file, file, file], fps=2))
    assert rated.frames.fps == 2
    assert [(frame.data, frame.header.HasField("raw")) for frame in rated.frames.frames] == [(file, False)] * 3


def test_frames_of_two_sizes_are_refused_by_their_index() -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of("look", Frames([scene(6, 9), scene(9, 6)], fps=1))
    assert (caught.value.reason, caught.value.item) == ("FRAME_LAYOUT", "messages[0].content[1]")
    assert caught.value.facts["index"] == 1


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "EMPTY_PROMPT"),
        ([Message("user", [])], "EMPTY_PROMPT"),
        ([Message("user", "")], "EMPTY_PROMPT"),
        ([Message("user", "a"), Message("system", "b")], "MESSAGE_ORDER"),
        ([Message("user", "a"), Message("assistant", "b")], "MESSAGE_ORDER"),
    ],
)
def test_conversations_that_are_none_are_refused(messages: list[Message], reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_generate("m", tuple(messages), request_id="r")
    assert caught.value.reason == reason


def test_whitespace_and_media_alone_are_taken() -> None:
    assert request_of(" ").prompt.conversation.turns[0].parts[0].text == " "
    assert request_of(Image(b"x")).prompt.conversation.turns[0].parts[0].slot == 0


@pytest.mark.parametrize("text", ["\x00", "\ufeffbom", "\u202eright to left", "😀", "<|im_end|>"])
def test_odd_text_is_text(text: str) -> None:
    request = rpb.GenerateRequest.FromString(request_of(text).SerializeToString())
    assert request.prompt.conversation.turns[0].parts[0].text == text


def test_a_lone_surrogate_is_refused_before_sending() -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of("fine", "broken \ud83d here")
    assert (caught.value.reason, caught.value.item) == ("MALFORMED_REQUEST", "messages[0].content[1]")
    assert caught.value.facts == {"index": 7}


@pytest.mark.parametrize("request_id", ["", "a" * 129, "line\nbreak", "é"])
def test_a_request_id_is_short_and_printable(request_id: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_generate("m", (Message("user", "a"),), request_id=request_id)
    assert (caught.value.reason, caught.value.facts["field"]) == ("FIELD_OUT_OF_RANGE", "request_id")


def test_an_empty_medium_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of("a", Image(b"x"), Video(b""))
    assert (caught.value.reason, caught.value.item) == ("MEDIA_EMPTY", "messages[0].content[2]")


def test_media_larger_than_a_message_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.mp4"
    with path.open("wb") as file:
        file.truncate(MEDIA_BYTES + 1)  # sparse
    with pytest.raises(InvalidRequest) as caught:
        request_of(Video(path))
    assert (caught.value.reason, caught.value.item) == ("MEDIA_TOO_LARGE", "messages[0].content[0]")
    assert caught.value.facts == {"bytes": MEDIA_BYTES + 1, "limit": MEDIA_BYTES}


def test_png_of_any_depth_goes_through_untouched() -> None:
    data = png(np.arange(12, dtype=np.uint16).reshape(3, 4, 1) * 5000, 16, 0)
    assert medium_of(Image(data)).data == data


def test_true_is_no_number_of_tokens() -> None:
    with pytest.raises(TypeError, match="max_tokens must be a whole number, not True"):
        to_generate("digits", (Message("user", "x"),), request_id="a", max_tokens=True)


def test_whole_numbers_of_another_library_reach_the_wire() -> None:
    request = to_generate("digits", (Message("user", "x"),), request_id="a", max_tokens=np.int16(3)).request  # type: ignore[arg-type]
    assert request.sampling.max_tokens == 3
