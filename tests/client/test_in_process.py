"""The SDK against the real system in this process: the shipped model, both halves and the entry store.

Entries are keyed by resized pixels, so "the same picture, given in another way" is told exactly: nothing is encoded.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

import chiasm
from chiasm.client import (
    AsyncClient,
    Client,
    Content,
    Finished,
    Frames,
    Generation,
    Handle,
    Image,
    Message,
    SamplingParams,
    Token,
    Video,
)
from chiasm.client.transport import in_process
from chiasm.errors import CheckpointError, DeadlineExceeded, InvalidRequest, NotFound, Unsupported

HELD_OUT = Path(chiasm.__file__).parent / "checkpoints" / "digits" / "held_out"
READ = "Read the digits."


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client.in_process() as opened:
        yield opened


def encoded(answer: Generation) -> int:
    return sum(medium.units - (medium.units_cached or 0) for medium in answer.usage.media)


def picture(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """(64, 64, 3) without any symmetry; another for each seed."""
    return np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def png(rgb: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(rgb).save(file, format="PNG")
    return file.getvalue()


def ask(client: Client, content: Content) -> Generation:
    return client.generate("digits", content, max_tokens=2)


def test_a_video_is_answered_with_what_was_seen(client: Client) -> None:
    with client.stream("digits", [Video(HELD_OUT / "clip_3.mp4"), READ], max_tokens=16) as stream:
        events = list(stream)
    assert [frame.offset for frame in stream.frames] == [0.0, 1.0, 2.0]
    drawn = [event for event in events if isinstance(event, Token)]
    assert drawn
    assert {event.visible for event in drawn} == {3}
    assert "".join(event.text for event in drawn) == stream.text
    assert isinstance(events[-1], Finished)
    assert stream.usage is not None
    (medium,) = stream.usage.media
    assert (medium.kind, medium.units, medium.frames_used, medium.offsets) == ("video", 3, 3, (0.0, 1.0, 2.0))
    assert stream.usage.output_tokens == len(stream.ids)


def test_the_second_question_about_the_same_media_encodes_nothing(client: Client) -> None:
    content: Content = [Video(HELD_OUT / "clip_8.mp4"), READ]
    first, second = (client.generate("digits", content) for _ in range(2))
    assert (encoded(first), encoded(second)) == (8, 0)
    assert second.ids == first.ids


def test_a_picture_is_the_same_however_it_is_given(client: Client, tmp_path: Path) -> None:
    rgb = picture(1)
    path = tmp_path / "picture.bin"
    path.write_bytes(png(rgb))
    assert encoded(ask(client, [Image(path), READ])) == 1
    rgba = np.concatenate([rgb, np.full((64, 64, 1), 255, np.uint8)], axis=2)
    ways = {
        "str": Image(str(path)),
        "bytes": Image(png(rgb)),
        "bytearray": Image(bytearray(png(rgb))),
        "file": Image(path.open("rb")),
        "HWC": Image(rgb),
        "CHW": Image(np.ascontiguousarray(rgb.transpose(2, 0, 1))),
        "flipped twice": Image(rgb[::-1].copy()[::-1]),
        "RGBA": Image(rgba),
        "Pillow": Image(Pillow.fromarray(rgb)),
        "Pillow from a file": Image(Pillow.open(path)),
        "Pillow RGBA": Image(Pillow.fromarray(rgba)),
    }
    assert {name: encoded(ask(client, [way, READ])) for name, way in ways.items()} == dict.fromkeys(ways, 0)
    assert encoded(ask(client, [Image(rgb[::-1]), READ])) == 1, "a flipped picture is another one"


def test_16_bit_grey_is_the_same_from_pillow_and_from_a_file(client: Client) -> None:
    values = np.random.default_rng(5).integers(0, 65536, (64, 64), dtype=np.uint16)
    image = Pillow.fromarray(values)
    file = io.BytesIO()
    image.save(file, format="PNG")
    assert encoded(ask(client, [Image(file.getvalue()), READ])) == 1
    assert encoded(ask(client, [Image(image), READ])) == 0
    assert encoded(ask(client, [Image((values >> 8).astype(np.uint8)), READ])) == 0


def test_frames_carry_their_times(client: Client) -> None:
    shown = [picture(seed) for seed in (11, 12, 13)]
    timed = ask(client, [Frames(shown, timestamps=[0.5, 2.0, 9.75]), READ])
    assert [frame.offset for frame in timed.frames] == [0.5, 2.0, 9.75]
    rated = ask(client, [Frames([png(rgb) for rgb in shown], fps=2), READ])
    assert [frame.offset for frame in rated.frames] == [0.0, 0.5, 1.0]
    assert (encoded(timed), encoded(rated)) == (3, 0)


def test_frames_of_a_video_are_chosen(client: Client) -> None:
    clip = HELD_OUT / "clip_8.mp4"

    def offsets(video: Video) -> list[float | None]:
        return [frame.offset for frame in ask(client, [video, READ]).frames]

    assert offsets(Video(clip, timestamps=[1.0, 4.2])) == [1.0, 4.0]
    assert offsets(Video(clip, max_frames=2)) == [0.0, 7.0]
    assert offsets(Video(clip, start=2, end=4)) == [2.0, 3.0]


def test_turns_and_media_in_order(client: Client) -> None:
    messages = [
        Message("system", "Answer the user."),
        Message("user", [Image(picture(1)), Image(picture(2)), READ]),
        Message("assistant", "3 7"),
        Message("user", READ),
    ]
    answer = client.generate("digits", messages=messages, max_tokens=2)
    assert [(frame.slot, frame.index, frame.offset) for frame in answer.frames] == [(0, 0, None), (1, 0, None)]


def test_sampling_depends_on_its_seed(client: Client) -> None:
    content: Content = [Image(picture(3)), READ]

    def ids(**options: float) -> tuple[int, ...]:
        params = SamplingParams(**options)  # type: ignore[arg-type]
        return client.generate("digits", content, sampling=params, max_tokens=12).ids

    assert ids(temperature=50.0, seed=4) == ids(temperature=50.0, seed=4)
    assert len({ids(temperature=50.0, seed=seed) for seed in range(4)}) > 1
    assert ids(temperature=0.0, seed=1) == ids(temperature=0.0, seed=2) == ids()


def test_a_stop_string_ends_an_answer_and_log_probabilities_come_with_it(client: Client) -> None:
    content: Content = [Video(HELD_OUT / "clip_3.mp4"), READ]
    whole = client.generate("digits", content)
    assert whole.logprobs == () and whole.stop is None
    stop = whole.text[2:4]
    sampling = SamplingParams(stop=[stop], logprobs=2)
    with client.stream("digits", content, sampling=sampling) as stream:
        for _ in stream:
            assert whole.text.startswith(stream.text), "what may be a stop string is held back"
    answer = stream.generation()
    assert (answer.text, answer.stop, answer.finish_reason) == (whole.text[: whole.text.index(stop)], stop, "stop")
    assert (stream.stop, stream.logprobs) == (answer.stop, answer.logprobs)
    assert [place.id for place in answer.logprobs] == list(answer.ids) == list(whole.ids[: len(answer.ids)])
    for place in answer.logprobs:
        (likeliest, logprob), (_, second) = place.top
        assert (likeliest, logprob) == (place.id, place.logprob) and second <= logprob <= 0


def test_max_tokens_ends_an_answer(client: Client) -> None:
    answer = client.generate("digits", [Video(HELD_OUT / "clip_3.mp4"), READ], max_tokens=1)
    assert (len(answer.ids), answer.finish_reason) == (1, "length")


def test_refusals_of_the_server_arrive_as_their_classes(client: Client) -> None:
    with pytest.raises(NotFound) as unknown:
        client.generate("nobody", READ)
    assert unknown.value.reason == "MODEL_NOT_FOUND"
    with pytest.raises(InvalidRequest) as broken:
        client.generate("digits", [READ, Image(b"no picture")], request_id="mine")
    assert (broken.value.reason, broken.value.item) == ("MEDIA_UNSUPPORTED", "messages[0].content[1]")
    assert broken.value.request_id == "mine"
    assert not broken.value.retryable


def test_leaving_early_leaves_the_system_usable(client: Client) -> None:
    for _ in range(3):
        with client.stream("digits", [Video(HELD_OUT / "clip_8.mp4"), READ]) as stream:
            next(stream)
    assert ask(client, [Video(HELD_OUT / "clip_8.mp4"), READ]).ids


def test_a_deadline_ends_a_request(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.generate("digits", [Video(HELD_OUT / "clip_8.mp4"), READ], timeout=1e-6)


def test_a_medium_is_uploaded_once_and_asked_about_many_times(client: Client) -> None:
    whole = ask(client, [Video(HELD_OUT / "clip_5.mp4"), READ])
    handle = client.upload(Video(HELD_OUT / "clip_5.mp4"))
    assert (handle.kind, handle.byte_length) == ("video", (HELD_OUT / "clip_5.mp4").stat().st_size)
    for _ in range(2):
        again = ask(client, [handle, READ])
        assert (again.ids, encoded(again)) == (whole.ids, 0)
    assert ask(client, [Video(handle, max_frames=2), READ]).usage.media[0].frames_used == 2
    with pytest.raises(NotFound) as caught:
        ask(client, [READ, Handle("0" * 32, "video")])
    assert (caught.value.reason, caught.value.item) == ("MEDIA_EXPIRED", "messages[0].content[1]")


def test_frames_and_arrays_are_uploaded_as_what_they_are(client: Client) -> None:
    frames = Frames([picture(31), picture(32)], timestamps=[0.5, 3])
    told = ask(client, [frames, READ])
    handle = client.upload(frames)
    again = ask(client, [handle, READ])
    assert (again.ids, encoded(again), again.usage.media[0].offsets) == (told.ids, 0, told.usage.media[0].offsets)
    told = ask(client, [Image(picture(33)), READ])
    again = ask(client, [client.upload(Image(picture(33))), READ])
    assert (again.ids, encoded(again), again.usage.media[0].kind) == (told.ids, 0, "image")


def test_an_embedding_is_one_vector_of_length_1_whose_likes_are_alike(client: Client) -> None:
    shown = [Image(path.read_bytes()) for path in sorted(HELD_OUT.glob("image_*.png"))[:2]]
    first, second = (client.embed("digits", [READ, picture]) for picture in shown)
    again = client.embed("digits", [READ, shown[0]], normalize=False)
    assert first.vector.dtype == np.float32 and first.vector.ndim == 1 and not first.vector.flags.writeable
    assert abs(float(first.vector @ first.vector) - 1) < 1e-6
    likeness = float(first.vector @ again.vector / np.linalg.norm(again.vector))
    assert likeness > 1 - 1e-6 > float(first.vector @ second.vector)
    assert first.usage.media[0].kind == "image" and first.usage.output_tokens == 0
    told = client.embed("digits", READ, system="Be brief.", request_id="mine")
    same = client.embed("digits", messages=[Message("system", "Be brief."), Message("user", READ)])
    assert told.request_id == "mine"
    np.testing.assert_allclose(told.vector, same.vector, rtol=0, atol=1e-6)
    assert client.embed("digits", token_ids=[4, 5, 6]).usage.prompt_tokens == 3
    assert "embed" in client.list_models()[0].operations


def test_an_estimate_is_what_the_answer_then_uses(client: Client) -> None:
    content: Content = [
        "Read the digits.",
        Video(HELD_OUT / "clip_6.mp4", max_frames=4),
        Image(HELD_OUT / "image_7.png"),
    ]
    estimate = client.estimate("digits", content)
    usage = ask(client, content).usage
    assert (estimate.prompt_tokens, estimate.visual_tokens) == (usage.prompt_tokens, usage.visual_tokens)
    assert [medium.usage.offsets for medium in estimate.media] == [medium.offsets for medium in usage.media]
    assert [medium.usage.frames_decoded for medium in estimate.media] == [0, 0]
    assert all(medium.entry_bytes > 0 for medium in estimate.media)
    assert estimate.room > 0 and estimate.fits_with == ""


def test_a_prompt_of_token_ids_is_laid_as_it_is(client: Client) -> None:
    asked = client.generate("digits", token_ids=[4, 5, 6], max_tokens=2)
    assert (asked.usage.prompt_tokens, asked.usage.output_tokens) == (3, 2)
    banned = SamplingParams(banned_token_ids=[asked.ids[0]], ignore_eos=True)
    assert client.generate("digits", token_ids=[4, 5, 6], sampling=banned, max_tokens=1).ids[0] != asked.ids[0]


async def test_the_asynchronous_client_opens_in_its_context() -> None:
    async with AsyncClient.in_process() as client:
        (model,) = await client.list_models()
        assert (model.name, model.family, model.ready) == ("digits", "moss_vl", True)
        answer = await client.generate(model.name, [Image(picture(1)), READ], max_tokens=2)
        assert len(answer.frames) == 1


def test_a_model_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match="nobody"):
        Client.in_process("nobody")


async def test_a_package_that_was_not_installed_is_named() -> None:
    with pytest.raises(Unsupported, match="pip install") as caught:
        await in_process("digits", group="chiasm.no_such_group")()
    assert caught.value.facts == {"entry_point": "chiasm.no_such_group"}


def test_the_sdk_is_light_and_whole() -> None:
    code = (
        "import json, sys, chiasm, chiasm.client;"
        "names = [getattr(chiasm, name) is not None for name in chiasm.__all__];"
        "names += [hasattr(chiasm.client, name) for name in chiasm.client.__all__];"
        "print(json.dumps([all(names), sorted({m.split('.')[0] for m in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole, loaded = json.loads(done.stdout)
    assert whole
    assert {"torch", "av", "PIL", "transformers", "ray", "grpc"}.isdisjoint(loaded)


def test_importing_the_package_costs_next_to_nothing() -> None:
    code = "import chiasm, sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"numpy", "google", "grpc", "blake3", "pydantic"}.isdisjoint(done.stdout.split())
