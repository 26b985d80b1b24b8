"""Three processes over sockets: the same answers as one process gives, right digits at a concurrency, workers that are
killed, clients that leave, and nothing left behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from chiasm import (
    AsyncClient,
    Client,
    FramesVisible,
    Generation,
    Handle,
    Image,
    InvalidRequest,
    NotFound,
    Started,
    Token,
    Unavailable,
    Video,
)
from chiasm.chat_template import Slot, Turn
from chiasm.client import Content
from chiasm.models.registry import open_model
from tests import digits
from tests.e2e.test_digits import drawn
from tests.e2e.test_streaming import Sender, numbers
from tests.processes import Trio, trio
from tests.rpc.running import children
from tests.waiting import until

AT_ONCE = 16
QUESTION = "Read the digits."


def clip(number: int = -1) -> digits.ShippedClip:
    return digits.shipped_clips()[number]


async def running_requests(served: Trio, count: int) -> None:
    """Waits until the router serves that many."""
    await until(lambda: served.router.counted()["chiasm_num_requests_running"] == count)


# -- the same, and right -----------------------------------------------------------------------------------------------


async def test_answers_equal_those_of_one_process_id_by_id(served: Trio) -> None:
    pictures = [Image(path.read_bytes()) for path, _ in digits.shipped_images()[:2]]
    questions: list[Content] = [
        [QUESTION, Video(clip().path)],
        [Video(clip(0).path), "Which digit is at 1.0 seconds?"],
        [*pictures, QUESTION],
        [Video(clip(1).path, fps=0.5), pictures[0], QUESTION],
        ["Say something."],
    ]
    async with AsyncClient.in_process("digits") as inside, AsyncClient(served.target) as outside:
        for asked in questions:
            here = await inside.generate("digits", asked, max_tokens=24)
            there = await outside.generate("digits", asked, max_tokens=24)
            assert (there.ids, there.text, there.finish_reason) == (here.ids, here.text, here.finish_reason)
            assert there.frames == here.frames
            assert [m.grid for m in there.usage.media] == [m.grid for m in here.usage.media]


@pytest.mark.timeout(240)
async def test_many_at_once_read_the_right_digits_each_its_own(served: Trio) -> None:
    rng = np.random.default_rng(31)
    asked: list[Content] = []
    expected: list[list[int]] = []
    for i in range(6 * AT_ONCE):
        frames, shown = drawn(rng, 1 + i % 8)
        video = i % 2 == 0
        asked.append(
            [Video(digits.clip(frames)), QUESTION] if video else [*(Image(digits.image(f)) for f in frames), QUESTION]
        )
        expected.append(shown)
    turns = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(served.target) as client:

        async def one(content: Content) -> Generation:
            async with turns:
                return await client.generate("digits", content, max_tokens=24)

        answers = await asyncio.gather(*(one(content) for content in asked))
    whole = sum(answer.text.split() == list(map(str, shown)) for answer, shown in zip(answers, expected, strict=True))
    digit = total = 0
    for answer, shown in zip(answers, expected, strict=True):
        said = answer.text.split()
        digit += sum(a == str(b) for a, b in zip(said, shown, strict=False))
        total += max(len(shown), len(said))
    assert digit / total >= 0.95, f"{digit} of {total} digits, {whole} of {len(answers)} answers whole"
    await served.settled()


async def test_a_second_question_about_the_same_video_encodes_nothing(served: Trio) -> None:
    frames, shown = drawn(np.random.default_rng(5), 4)
    video = Video(digits.clip(frames))
    async with AsyncClient(served.target) as client:
        first = await client.generate("digits", [QUESTION, video])
        again = await client.generate("digits", ["Which digit is at 0.0 seconds?", video])
    assert first.usage.media[0].units_cached == 0 and again.usage.media[0].units_cached == len(shown)


async def test_what_was_visible_is_told_with_the_tokens(served: Trio) -> None:
    async with AsyncClient(served.target) as client, client.stream("digits", [Video(clip().path), QUESTION]) as stream:
        events = [event async for event in stream]
    assert isinstance(events[0], Started) and isinstance(events[1], FramesVisible)
    assert events[1].count == len(clip().digits) and events[1].until == clip().seconds[-1]
    assert {event.visible for event in events if isinstance(event, Token) and event.ids} == {len(clip().digits)}


async def test_token_ids_of_a_callers_own_say_what_text_and_media_say(served: Trio) -> None:
    prompt = open_model("digits").prompt()
    pieces = prompt.turns([Turn("user", (Slot(0), QUESTION))])
    pad = open_model("digits").config.image_token_id
    ids: list[int] = []
    for piece in pieces:
        laid = prompt.medium("video", clip().seconds) if isinstance(piece, Slot) else [piece]
        ids += [token for run in laid for token in ([pad] if isinstance(run, int) else run)]
    async with AsyncClient(served.target) as client:
        told = await client.generate("digits", [Video(clip().path), QUESTION])
        own = await client.generate("digits", token_ids=ids, media=[Video(clip().path)])
        assert (own.ids, own.text, own.usage.visual_tokens) == (told.ids, clip().answer, told.usage.visual_tokens)
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("digits", token_ids=ids, media=[])
        assert caught.value.reason == "PLACEHOLDER_MISMATCH"


async def test_an_embedding_equals_that_of_one_process_and_survives_its_decoder(served: Trio) -> None:
    asked: list[Content] = [["Read the digits.", Video(clip().path)], ["Say something."]]
    async with AsyncClient.in_process("digits") as inside, AsyncClient(served.target) as outside:
        here = [await inside.embed("digits", content) for content in asked]
        there = await asyncio.gather(*(outside.embed("digits", content) for content in asked * 4))
        for one, other in zip(there, here * 4, strict=True):
            np.testing.assert_allclose(one.vector, other.vector, rtol=0, atol=1e-5)
            assert abs(float(np.linalg.norm(one.vector)) - 1) < 1e-6
            assert one.usage.prompt_tokens == other.usage.prompt_tokens
        served.decoder.pause()
        asking = asyncio.create_task(outside.embed("digits", asked[0]))
        await running_requests(served, 1)
        await asyncio.sleep(0.2)  # its prompt is on its way to a process that does not move
        await asyncio.to_thread(served.decoder.kill)
        served.decoder.start()
        np.testing.assert_allclose((await asking).vector, here[0].vector, rtol=0, atol=1e-5)
    await asyncio.to_thread(served.decoder.wait_for, "ready")
    await served.settled(seconds=45)


# -- uploads, estimates, models ----------------------------------------------------------------------------------------


async def test_an_upload_is_sent_once_and_named_many_times(served: Trio) -> None:
    async with AsyncClient(served.target) as client:
        handle = await client.upload(Video(clip().path))
        assert isinstance(handle, Handle)
        for _ in range(2):
            assert (await client.generate("digits", [handle, QUESTION])).text == clip().answer
        with pytest.raises(NotFound) as caught:
            await client.generate("digits", [Handle("0" * 32, "video"), QUESTION])
    assert (caught.value.reason, caught.value.item) == ("MEDIA_EXPIRED", "messages[0].content[0]")


async def test_an_estimate_says_what_the_answer_will_use_and_encodes_nothing(served: Trio) -> None:
    frames, _ = drawn(np.random.default_rng(6), 3)
    content: Content = [Video(digits.clip(frames)), QUESTION]
    before = served.encoder.counted()["chiasm_encoder_units_total:encoded"]
    async with AsyncClient(served.target) as client:
        estimate = await client.estimate("digits", content)
        assert served.encoder.counted()["chiasm_encoder_units_total:encoded"] == before
        answer = await client.generate("digits", content)
        await served.settled()
        (model,) = await client.list_models()
    assert estimate.prompt_tokens == answer.usage.prompt_tokens
    assert estimate.visual_tokens == answer.usage.visual_tokens
    assert estimate.media[0].usage.grid == answer.usage.media[0].grid
    assert 0 < estimate.room < model.context_limit == estimate.context_limit
    assert model.name == "digits" and model.ready


# -- workers that die --------------------------------------------------------------------------------------------------


async def test_an_encoder_killed_in_the_middle_of_a_request_is_replaced_by_its_restart(served: Trio) -> None:
    async with AsyncClient(served.target) as client:
        served.encoder.pause()
        asking = asyncio.create_task(client.generate("digits", [Video(clip().path), QUESTION]))
        await running_requests(served, 1)
        await asyncio.sleep(0.2)  # the medium is on its way to a process that does not move
        await asyncio.to_thread(served.encoder.kill)
        served.encoder.start()
        answer = await asking
    assert answer.text == clip().answer
    await asyncio.to_thread(served.encoder.wait_for, "ready")
    await served.settled(seconds=45)  # what the dead one had pinned is free when its leases end


async def test_a_decoder_killed_before_its_first_token_is_replaced_by_its_restart(served: Trio) -> None:
    async with AsyncClient(served.target) as client:
        served.decoder.pause()
        asking = asyncio.create_task(client.generate("digits", [Video(clip().path), QUESTION]))
        await running_requests(served, 1)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(served.decoder.kill)
        served.decoder.start()
        answer = await asking
    assert answer.text == clip().answer
    await asyncio.to_thread(served.decoder.wait_for, "ready")
    await served.settled(seconds=45)


async def test_encoders_killed_under_load_lose_no_answer(served: Trio) -> None:
    rng = np.random.default_rng(41)
    stop = asyncio.Event()
    wrong: list[str] = []
    answered = 0

    async def ask_on(client: AsyncClient) -> None:
        nonlocal answered
        while not stop.is_set():
            frames, shown = drawn(rng, 3)
            answer = await client.generate("digits", [Video(digits.clip(frames)), QUESTION], max_tokens=12)
            answered += 1
            if len(answer.text.split()) != len(shown):
                wrong.append(f"{answer.text} instead of {shown}")

    async with AsyncClient(served.target) as client:
        asking = [asyncio.create_task(ask_on(client)) for _ in range(4)]
        for _ in range(2):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(served.encoder.kill)
            before = answered
            served.encoder.start()
            await asyncio.to_thread(served.encoder.wait_for, "ready")
            await until(lambda before=before: answered >= before + 8)  # type: ignore[misc]
        stop.set()
        await asyncio.gather(*asking)
    assert len(wrong) <= answered * 0.05, wrong
    await served.settled(seconds=45)


@pytest.mark.parametrize("killed", [False, True])
async def test_frames_are_encoded_as_they_are_sent_and_an_encoder_killed_meanwhile_is_replaced(
    served: Trio, killed: bool
) -> None:
    pictures, expected = numbers(6, 43 + killed)
    async with AsyncClient(served.target) as client:
        sender = Sender(await client._link.routes.current(), pictures)
        handle = Handle(sender.medium.handle, "video", listed=True)
        before = encoded(served)
        asking = asyncio.create_task(client.generate("digits", [handle, QUESTION]))
        sender.send(3)
        await until(lambda: encoded(served) == before + 3)
        if killed:
            await asyncio.to_thread(served.encoder.kill)
            served.encoder.start()
        await sender.rest(0.05)
        answer = await asking
    assert answer.text == expected
    if killed:
        await asyncio.to_thread(served.encoder.wait_for, "ready")
        assert encoded(served) == 3, "what was announced is not encoded again"
    await served.settled(seconds=45)


def encoded(served: Trio) -> float:
    """Units that the encoder made since it was started."""
    return served.encoder.counted()["chiasm_encoder_units_total:encoded"]


async def test_entries_outlive_the_encoder_that_made_them(served: Trio) -> None:
    frames, shown = drawn(np.random.default_rng(7), 5)
    video = Video(digits.clip(frames))
    async with AsyncClient(served.target) as client:
        first = await client.generate("digits", [video, QUESTION])
        await asyncio.to_thread(served.encoder.kill)
        served.encoder.start()
        again = await client.generate("digits", [video, QUESTION])
    assert first.usage.media[0].units_cached == 0 and again.usage.media[0].units_cached == len(shown)
    assert again.ids == first.ids
    await served.settled()


async def test_an_encoder_that_has_just_begun_knows_what_those_before_it_have_seen(served: Trio) -> None:
    frames, shown = drawn(np.random.default_rng(11), 5)
    data = digits.clip(frames)
    async with AsyncClient(served.target) as client:
        first = await client.generate("digits", [QUESTION, Video(data)])
        await asyncio.to_thread(served.encoder.kill)
        served.encoder.start()
        again = await client.generate("digits", [QUESTION, Video(data)])
        media = children(served.encoder.pid)
        after = served.encoder.counted()
    assert again.ids == first.ids and again.frames == first.frames
    assert again.usage.media[0].units_cached == len(shown)
    assert after["chiasm_encoder_memo_hits_total"] == after["chiasm_encoder_memo_queries_total"] == 1
    assert after["chiasm_encoder_media_spared_bytes_total"] == len(data)
    assert after["chiasm_encoder_memo_rejections_total"] == after["chiasm_encoder_units_total:encoded"] == 0
    assert not media, "nobody has opened the file"
    await served.settled()


async def test_without_any_worker_a_request_is_told_to_come_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    with trio(tmp_path_factory.mktemp("alone"), router=["--patience", "0.5"]) as served:
        async with AsyncClient(served.target, max_retries=0) as client:
            await client.generate("digits", ["Say something."], max_tokens=1)
            await asyncio.to_thread(served.decoder.kill)
            with pytest.raises(Unavailable) as caught:
                await client.generate("digits", ["Say something."], max_tokens=1)
            assert caught.value.reason == "NO_READY_DECODER" and caught.value.retryable
            (model,) = await client.list_models()
            assert not model.ready
            served.decoder.start()
            await client.wait_ready()
            await client.generate("digits", ["Say something."], max_tokens=1)


# -- clients that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [1, 2, 3, 5])
async def test_a_client_that_leaves_after_some_events_frees_every_stage(served: Trio, events: int) -> None:
    async with AsyncClient(served.target) as client:
        async with client.stream("digits", [Video(clip().path), QUESTION]) as stream:
            for _ in range(events):
                await anext(stream)
        await served.settled()


@pytest.mark.parametrize("stopped", ["encoder", "decoder"])
async def test_a_client_that_leaves_while_a_worker_stands_still_frees_every_stage(served: Trio, stopped: str) -> None:
    frames, _ = drawn(np.random.default_rng(8), 3)
    role = getattr(served, stopped)
    async with AsyncClient(served.target) as client:
        role.pause()
        try:
            asking = asyncio.create_task(client.generate("digits", [Video(digits.clip(frames)), QUESTION]))
            await running_requests(served, 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await running_requests(served, 0)
        finally:
            role.go_on()
        await served.settled()


async def test_clients_that_leave_at_any_moment_free_every_stage(served: Trio) -> None:
    rng = np.random.default_rng(9)
    async with AsyncClient(served.target) as client:
        for delay in rng.uniform(0, 0.4, size=24):
            frames, _ = drawn(rng, 3)
            asking = asyncio.create_task(client.generate("digits", [Video(digits.clip(frames)), QUESTION]))
            await asyncio.sleep(float(delay))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await served.settled()
        assert (await client.generate("digits", [Video(clip().path), QUESTION])).text == clip().answer


def test_the_synchronous_client_asks_the_same(served: Trio) -> None:
    with Client(served.target) as client, client.stream("digits", [Video(clip().path), QUESTION]) as stream:
        assert "".join(event.text for event in stream if isinstance(event, Token)) == clip().answer
