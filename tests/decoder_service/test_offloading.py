"""A decoder whose weights leave its device: answers are finished first, new ones refused until they are back; and one
whose blocks are streamed answers as any other."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from chiasm.errors import Unavailable, Unsupported
from chiasm.local import LocalService, LocalSettings
from chiasm.models.registry import Model, find
from chiasm.models.residence import Residence
from chiasm.models.streaming import Streaming
from chiasm.rpc.call import answered
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.settings import SettingsError
from decoder_service.computing import captured_rows
from decoder_service.engine import DecoderEngine, Work
from tests import digits
from tests.asking import Answer, ask, note, question, running, video
from tests.decoder_service.played import Interpreted
from tests.rpc.workers import decode, decoder, worker


@pytest.fixture
def model() -> Model:
    return Model(find("digits"))


def engine(model: Model, streaming: Streaming | None = None, **options: object) -> DecoderEngine:
    half = model.decoder(dtype=torch.float32, streaming=streaming)
    return DecoderEngine(half, model.processor, text_tokens=256, visual_tokens=64, **options)  # type: ignore[arg-type]


def test_a_step_without_weights_is_refused_and_takes_no_page(model: Model) -> None:
    one = engine(model)
    sequence = one.sequence()
    sequence.extend([[1, 2, 3]])
    (before,) = one.step([Work(sequence, 2, "all")])
    one.offload()
    free = one.pages.free
    with pytest.raises(Unavailable) as caught:
        one.step([Work(sequence, 1, "last")])
    assert (caught.value.reason, caught.value.retryable) == ("OFFLOADED", True)
    assert one.pages.free == free and sequence.computed == 2
    one.load()
    again = one.sequence()
    again.extend([[1, 2, 3]])
    assert torch.equal(one.step([Work(again, 2, "all")])[0], before)
    (last,) = one.step([Work(sequence, 1, "last")])
    assert torch.equal(last, one.step([Work(again, 1, "last")])[0]), "what the pools hold has stayed"


def test_steps_that_are_graphs_keep_their_weights(model: Model) -> None:
    one = engine(model, graph_rows=4, forward=Interpreted())
    with pytest.raises(Unsupported, match="OFFLOAD_CAPTURED"):
        one.offload()
    assert one.residence.here


def test_streamed_blocks_are_neither_captured_nor_compiled(model: Model) -> None:
    with pytest.raises(SettingsError, match="streamed blocks") as caught:
        engine(model, Streaming(), graph_rows=4)
    assert caught.value.where == "--layerwise-offload"
    with pytest.raises(SettingsError, match="streamed blocks") as caught:
        engine(model, Streaming(), compiled=True)
    assert caught.value.where == "--compile"
    with pytest.raises(SettingsError, match="streamed blocks"):
        captured_rows(True, 64, "flashinfer", streams=True)
    assert captured_rows(None, 64, "flashinfer", streams=True) == 0
    assert captured_rows(None, 64, "flashinfer") == 64


def test_streamed_steps_can_be_deterministic(model: Model) -> None:
    made = []
    for streaming in (None, Streaming()):
        one = engine(model, streaming, deterministic=True)
        sequence = one.sequence()
        sequence.extend([[1, 2, 3, 4]])
        made += one.step([Work(sequence, 3, "all")]) + one.step([Work(sequence, 1, "last")])
    assert torch.equal(made[0], made[2]) and torch.equal(made[1], made[3])


@pytest.mark.parametrize("blocks", [2, 4])
async def test_the_digits_are_read_by_streamed_halves(blocks: int) -> None:
    settings = LocalSettings(streaming=Streaming(resident_blocks=blocks))
    async with running() as resident, running(settings=settings) as streamed:
        assert Residence.of(streamed.decoder.engine.half).streams and streamed.encoder.residence.streams
        for clip in digits.shipped_clips()[:2]:
            request = question("Read the digits.", video(clip.path.read_bytes()))
            one, other = await ask(resident, request), await ask(streamed, request)
            assert one.text == other.text == clip.answer


async def answering(service: LocalService, begun: asyncio.Event) -> Answer:
    """A long answer, which tells when it has begun."""
    answer = Answer()
    request = question("Read:", max_tokens=200)
    request.sampling.min_tokens = 200
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            note(answer, event)
            if answer.ids:
                begun.set()
    return answer


async def test_an_answer_that_runs_is_finished_and_the_next_is_refused_until_they_are_back() -> None:
    async with running() as service:
        expected = await ask(service, question("Read:", max_tokens=8))
        begun = asyncio.Event()
        first = asyncio.create_task(answering(service, begun))
        await begun.wait()
        leaving = asyncio.create_task(service.decoder.offload())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="OFFLOADED"):
            service.decoder.sequence(bytes(32))
        answer = await first
        assert len(answer.ids) == 200, "it was let in, and is finished"
        await leaving
        assert not service.decoder.engine.residence.here
        with pytest.raises(Unavailable) as caught:
            service.decoder.sequence(bytes(32))
        assert caught.value.reason == "OFFLOADED"
        await service.decoder.load()
        assert (await ask(service, question("Read:", max_tokens=8))).ids == expected.ids


def maps_within(pid: int, folder: Path) -> bool:
    """Whether a process has a file of that folder mapped, if only one without a name."""
    return str(folder) in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


async def test_a_process_streams_its_blocks_when_it_is_told_to(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    flags = ("--layerwise-offload", "--resident-blocks", "3", "--offload-dir", str(folder))
    told = []
    for more in ((), flags):
        async with worker("decoder_service", tmp_path, *more) as process:
            ready = await process.logged("ready")
            async with connect(ready["target"]) as channel:
                info = await answered(decoder(channel).Info(dpb.DecoderInfoRequest()))
                _, responses = await decode(channel, info.models[0].fingerprint, "Read the digits.", max_tokens=8)
                assert maps_within(process.pid, folder) is bool(more)
        told.append([token for response in responses for token in response.tokens.ids])
    assert told[0] == told[1] != []
