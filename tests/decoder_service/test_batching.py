"""Answers that run together: the same as alone, in shared steps, and each with its own faults and its own pace."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chiasm.errors import ServerError
from chiasm.models.registry import SHIPPED
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc
from chiasm.tokenizer import Tokenizer
from decoder_service.decoding import UNREAD
from decoder_service.engine import Work
from tests import digits
from tests.decoder_service.halves import CLOSE, Halves, Told, halves, sent, sized


def going_on(system: Halves, text: str, tokens: int) -> dpb.DecodeOpen:
    """A question that is answered with exactly so many tokens."""
    opened = system.opened(text, max_tokens=tokens)
    opened.sampling.ignore_eos = True
    return opened


def assert_together(batches: Sequence[int], tokens: int) -> None:
    """Eight answers of so many tokens began within two steps of each other, ran together and ended as they began."""
    fewer = [size for size in batches if size < 8]
    assert batches.count(8) >= tokens - 2 and len(fewer) <= 6, batches


class Held:
    """The device, kept busy until `let_go`."""

    def __init__(self, system: Halves) -> None:
        self._system = system
        self._gate = threading.Event()
        self._busy = asyncio.create_task(system.decoder.run(self._gate.wait))

    async def let_go(self, *, waiting: int) -> None:
        """Once so many sequences wait for a step."""
        while self._system.decoder.scheduler.asking < waiting:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
        self._gate.set()
        await self._busy


async def test_eight_answers_share_their_steps_and_are_what_they_are_alone() -> None:
    """In float64, because the answers go on behind their ends, where a token may be as good as another."""
    rng = np.random.default_rng(11)
    cells = digits.held_out_digits()
    async with halves(dtype=torch.float64) as system:
        clips = [[digits.frame(cells[i * 7 + j][0], rng) for j in range(i % 3 + 1)] for i in range(8)]

        async def ask(i: int) -> Told:
            messages = await system.ready(clips[i])
            opened = system.opened("Read the digits.", 0, max_tokens=24)
            opened.sampling.ignore_eos = True
            return await system.told(opened, sized(len(messages)), *messages, CLOSE)

        alone = [await ask(i) for i in range(8)]
        counts = system.decoder.scheduler.counts
        before = counts.steps
        together = await asyncio.gather(*(ask(i) for i in range(8)))
        steps = counts.steps - before
    assert [told.ids for told in together] == [told.ids for told in alone]
    assert len({told.text for told in alone}) > 4, "the clips differ, and so do the answers"
    assert sum(len(told.ids) for told in together) == 8 * 24 >= 3 * steps, "steps are shared"


async def test_answers_that_run_together_stay_together_from_their_first_token_to_their_last() -> None:
    async with halves() as system:
        held = Held(system)
        calls = [asyncio.create_task(system.told(going_on(system, f"Q{i}", 30), CLOSE)) for i in range(8)]
        await held.let_go(waiting=8)
        answers = await asyncio.gather(*calls)
        batches = system.decoder.scheduler.counts.batches
    assert all(len(told.ids) == 30 for told in answers)
    assert_together(batches, 30)


async def test_sockets_part_nobody(tmp_path: Path) -> None:
    """Every token is written to a socket of its own, which takes its own time."""
    async with halves() as system:
        server = grpc.aio.server()
        decoder_pb2_grpc.add_DecoderServicer_to_server(system.servicer, server)
        target = f"unix:{tmp_path}/decoder"
        server.add_insecure_port(target)
        await server.start()
        async with grpc.aio.insecure_channel(target) as channel:
            stub = decoder_pb2_grpc.DecoderStub(channel)
            held = Held(system)

            async def ask(i: int) -> Told:
                told = Told()
                async for response in stub.Decode(sent([going_on(system, f"Q{i}", 30), CLOSE], stays=False)):
                    told.note(response)
                return told

            calls = [asyncio.create_task(ask(i)) for i in range(8)]
            await held.let_go(waiting=8)
            answers = await asyncio.gather(*calls)
        await server.stop(None)
        batches = system.decoder.scheduler.counts.batches
    assert all(len(told.ids) == 30 for told in answers)
    assert_together(batches, 30)


async def test_b126_one_question_about_many_pictures_is_answered_as_one_by_one() -> None:
    rng = np.random.default_rng(12)
    cells = digits.held_out_digits()
    async with halves() as system:
        pictures = [digits.frame(cells[i // 4][0], rng) for i in range(32)]

        async def ask(i: int) -> list[int]:
            opened = system.opened("Read the digits.", 0)
            return (await system.told(opened, sized(1), *await system.ready([pictures[i]]), CLOSE)).ids

        serial = [await ask(i) for i in range(32)]
        await system.store.flush()
        assert await asyncio.gather(*(ask(i) for i in range(32))) == serial


async def test_b107_text_alone_runs_with_pictures_and_sees_none_of_them() -> None:
    """In float64, because the answers go on behind their ends."""
    rng = np.random.default_rng(13)
    picture = digits.frame(digits.held_out_digits()[0][0], rng)
    async with halves(dtype=torch.float64) as system:

        async def with_picture() -> list[int]:
            opened = system.opened("Read the digits.", 0, max_tokens=20)
            opened.sampling.ignore_eos = True
            return (await system.told(opened, sized(1), *await system.ready([picture]), CLOSE)).ids

        async def bare() -> list[int]:
            return (await system.told(going_on(system, "Read the digits.", 20), CLOSE)).ids

        alone = [await with_picture(), await bare()]
        counts = system.decoder.scheduler.counts
        before = counts.steps
        assert list(await asyncio.gather(with_picture(), bare())) == alone and alone[0] != alone[1]
        assert counts.steps - before < 40, "steps are shared"


async def test_logits_of_a_batch_are_those_of_each_sequence_alone() -> None:
    """In float64, where the sums of another batch size differ by nothing that matters."""
    async with halves(dtype=torch.float64) as system:
        engine, prompt = system.decoder.engine, system.decoder.prompt
        texts = ["Read the digits.", "x" * 40, "Which one?"]

        def sequences() -> list[Work]:
            made = []
            for text in texts:
                sequence = engine.sequence()
                sequence.extend([prompt.text(text)])
                made.append(Work(sequence, len(sequence.timeline), "all"))
            return made

        together = sequences()
        alone = sequences()
        batch = engine.step(together)
        for logits, work in zip(batch, alone, strict=True):
            (single,) = engine.step([work])
            assert torch.allclose(logits, single, rtol=1e-9, atol=1e-9)
        for work in together + alone:
            engine.release(work.sequence)


async def test_a_prefill_in_pieces_between_answers_changes_no_answer() -> None:
    async with halves(max_rows=16) as system:
        long = system.opened("Read the digits. " * 12, max_tokens=6)
        alone = await system.told(long, CLOSE)
        answers = [asyncio.create_task(system.told(going_on(system, f"Q{i}", 40), CLOSE)) for i in range(3)]
        pieces = await system.told(long, CLOSE)
        await asyncio.gather(*answers)
        rows, steps = system.decoder.scheduler.counts.rows, system.decoder.scheduler.counts.steps
    assert pieces.ids == alone.ids
    assert rows <= 16 * steps, "no step is larger than it may be"


async def test_a_reader_that_takes_nothing_holds_up_nobody_and_is_not_run_far_ahead_of() -> None:
    tokens = 3 * UNREAD
    async with halves() as system:
        engine = system.decoder.engine
        alone = await system.told(going_on(system, "Q", tokens), CLOSE)
        slow = system.decode(going_on(system, "Q", tokens), CLOSE)
        async with aclosing(slow):
            told = Told()
            told.note(await anext(slow))  # admitted; nothing is read after it
            await asyncio.gather(*(system.told(going_on(system, f"Q{i}", tokens), CLOSE) for i in range(3)))
            held = engine.holdings.held.pages * engine.pages.page_size
            assert told.admitted is not None
            assert held <= told.admitted.prompt_tokens + UNREAD + engine.pages.page_size
            async for response in slow:
                told.note(response)
    assert told.ids == alone.ids and len(told.ids) == tokens


def poisoned(folder: Path, character: str) -> Path:
    """The shipped checkpoint with one token that turns everything that sees it into NaN."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((SHIPPED / "digits" / name).read_bytes())
    weights = load_file(SHIPPED / "digits" / "model.safetensors")
    (embeddings,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    (token,) = Tokenizer.from_file(folder / "tokenizer.json").encode(character)
    weights[embeddings][token] = torch.nan
    save_file(weights, folder / "model.safetensors")
    return folder


async def test_b136_logits_that_are_not_finite_fail_their_own_row_only(tmp_path: Path) -> None:
    async with halves(poisoned(tmp_path / "poisoned", "~")) as system:
        healthy = await system.told(going_on(system, "Q0", 20), CLOSE)
        held = Held(system)
        calls = [system.told(going_on(system, text, 20), CLOSE) for text in ("Q0", "~", "Q0")]
        running = [asyncio.create_task(call) for call in calls]
        await held.let_go(waiting=3)
        first, bad, last = await asyncio.gather(*running, return_exceptions=True)
    assert isinstance(bad, ServerError) and bad.reason == "NONFINITE"
    assert isinstance(first, Told) and isinstance(last, Told)
    assert first.ids == last.ids == healthy.ids


@pytest.mark.parametrize("tokens_read", [0, 1, 5])
async def test_a_caller_that_leaves_frees_everything_and_its_neighbours_go_on(tokens_read: int) -> None:
    async with halves() as system:
        alone = await system.told(going_on(system, "Q0", 40), CLOSE)
        stays = asyncio.create_task(system.told(going_on(system, "Q0", 40), CLOSE))
        read = 0
        leaves = system.decode(going_on(system, "Q1", 2000), CLOSE)
        async with aclosing(leaves):
            async for response in leaves:
                read += response.HasField("tokens")
                if read >= tokens_read:
                    break
        assert system.decoder.running <= 1, "only the neighbour still holds anything"
        assert (await stays).ids == alone.ids


async def test_a_second_attempt_that_hands_everything_over_at_once_gets_the_same_answer() -> None:
    rng = np.random.default_rng(5)
    frames = [digits.frame(cells, rng) for cells, _ in digits.held_out_digits()[:4]]
    async with halves() as system:
        messages = await system.ready(frames)
        first = system.opened("Read the digits.", 0)
        lost = system.decode(first, sized(4), *messages[:2], CLOSE)
        async with aclosing(lost):
            async for response in lost:
                if response.HasField("attached"):
                    break  # and here its decoder is lost
        one = await system.told(first, sized(4), *await system.ready(frames), CLOSE)
        again = system.opened("Read the digits.", 0)
        again.attempt = 2
        messages = await system.ready(frames)
        two = await system.told(again, sized(4), *messages[::-1], CLOSE)
        for message in messages:
            await system.store.release(message.entry.key, message.entry.lease.lease_id)
        await forget(system)
    assert two.ids == one.ids and two.text == one.text
    assert two.started is not None and two.finished is not None
    assert two.started.attempt == two.finished.attempt == 2 and two.finished.tokens == len(two.ids)


async def forget(system: Halves) -> None:
    """Drops what the lost attempt left pinned: its caller alone knows those leases."""
    for key in system.store.held():
        await system.store.discard(key)


async def test_entries_that_come_before_their_slot_is_sized_are_refused() -> None:
    rng = np.random.default_rng(5)
    frames = [digits.frame(cells, rng) for cells, _ in digits.held_out_digits()[:1]]
    async with halves() as system:
        messages = await system.ready(frames)
        with pytest.raises(ServerError) as caught:
            await system.told(system.opened("Read the digits.", 0), *messages, sized(1), CLOSE)
        assert caught.value.reason == "FEATURE_COUNT_MISMATCH"
        await forget(system)
