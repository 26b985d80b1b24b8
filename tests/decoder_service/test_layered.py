"""States of all rows after chosen layers: those of an undivided pass, whatever is computed beside them and however the
prompt was cut into steps; found again where they were computed before, and doubted where anything is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from chiasm.errors import ChiasmError, InvalidRequest, ServerError, Unsupported
from chiasm.models.entries import identity_of
from chiasm.models.registry import Model
from chiasm.rpc.tensor import GatheredAll
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.kept_states import StatesRoom
from tests import checkpoints_qwen3_vl
from tests.decoder_service import test_pooled as pooled
from tests.decoder_service.halves import CLOSE, Halves, Message, halves
from tests.decoder_service.oracle import Replay
from tests.decoder_service.test_batching import poisoned
from tests.decoder_service.test_pooled import CLIPS, JUDGE, PROMPTS, close, handed
from tests.decoder_service.test_preempting import ask, pushed, say_all
from tests.waiting import until

LAYERS = (1, 3, 2)
"""Not in ascending order."""


class States(NamedTuple):
    """What a call was told."""

    arrays: list[npt.NDArray[np.float32]]
    said: list[pb.TensorDescriptor]
    data: list[bytes]
    finished: pb.Finished


def opened(system: Halves, *parts: str | int, layers: tuple[int, ...] = LAYERS, dtype: int = 0) -> dpb.DecodeOpen:
    asked = pooled.opened(system, *parts, dtype=dtype)
    asked.states.pooling = dpb.POOLING_NONE
    asked.states.layers.extend(layers)
    return asked


async def told(system: Halves, asked: dpb.DecodeOpen, *messages: Message) -> States:
    tensors, finished = GatheredAll(len(asked.states.layers)), list[pb.Finished]()
    async with aclosing(system.decode(asked, *messages)) as responses:
        async for response in responses:
            if response.HasField("states"):
                assert not finished
                tensors.add(response.states)
            elif response.HasField("finished"):
                finished.append(response.finished)
    assert tensors.whole
    (end,) = finished
    said, data = [one.descriptor for one in tensors.tensors], [one.data for one in tensors.tensors]
    arrays = [
        np.frombuffer(one.buffer, dtype=np.float32).reshape(one.descriptor.shape)
        for one in tensors.tensors
        if one.descriptor.dtype == pb.DTYPE_FLOAT32
    ]
    return States(arrays, said, data, end)


async def states(system: Halves, *parts: str | int, layers: tuple[int, ...] = LAYERS, dtype: int = 0) -> States:
    return await told(system, opened(system, *parts, layers=layers, dtype=dtype), *await handed(system, *parts), CLOSE)


def check(system: Halves, got: States, *parts: str | int, layers: tuple[int, ...] = LAYERS) -> None:
    """Holds states against an undivided float64 pass with dense attention."""
    replay = Replay(JUDGE(), pooled.opened(system, *parts), CLIPS)
    replay.lay_prompt()
    ascending = sorted(layers)
    wanted = dict(zip(ascending, JUDGE().states_after(ascending, replay.timeline, CLIPS), strict=True))
    assert [one.layer for one in got.said] == [*layers]
    for number, array in zip(layers, got.arrays, strict=True):
        close(array, wanted[number].numpy())


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_they_are_those_of_an_undivided_pass_in_the_order_asked_for(prompt: str) -> None:
    parts = PROMPTS[prompt]
    async with halves(JUDGE(), dtype=torch.float64, page_size=4) as system:
        got = await states(system, *parts)
        check(system, got, *parts)
    rows = got.finished.usage.prompt_tokens
    assert [(one.name, one.dtype, one.shape[0]) for one in got.said] == [("states", pb.DTYPE_FLOAT32, rows)] * 3
    assert (got.finished.reason, got.finished.usage.output_tokens) == (pb.FINISH_REASON_CLOSED, 0)
    assert got.finished.usage.cached_prompt_tokens == 0


@pytest.mark.parametrize("rows", [512, 12], ids=["whole", "in pieces"])
async def test_in_a_batch_of_many_beside_answers_and_vectors_each_is_its_own(rows: int) -> None:
    async with halves(JUDGE(), dtype=torch.float64, page_size=4, max_rows=rows) as system:
        callers = [ask(system, *([0] if i % 2 else []), f"Q{i}", tokens=40, seed=i) for i in range(4)]
        answering = [asyncio.create_task(caller.run()) for caller in callers]
        for caller in callers:
            await say_all(caller)
        await until(lambda: all(caller.told.ids for caller in callers))
        several = [*PROMPTS.values()]
        batch = [states(system, *parts, layers=LAYERS[: 1 + i % 3]) for i, parts in enumerate(several)]
        vectors = [pooled.embedded(system, *parts) for parts in several]
        told_states, told_vectors = await asyncio.gather(asyncio.gather(*batch), asyncio.gather(*vectors))
        await asyncio.gather(*answering)
        for i, (parts, got, vector) in enumerate(zip(several, told_states, told_vectors, strict=True)):
            check(system, got, *parts, layers=LAYERS[: 1 + i % 3])
            close(vector.numbers, pooled.expected(system, *parts))
    for caller in callers:
        caller.check_whole(JUDGE())


async def test_where_decoders_are_deterministic_they_are_the_same_to_the_last_bit_in_any_company() -> None:
    several = [*PROMPTS.values()]
    async with halves(deterministic=True, page_size=4) as system:
        alone = [await states(system, *parts) for parts in several]
    async with halves(deterministic=True, page_size=4, max_rows=7) as system:
        caller = ask(system, 0, "Read the digits.", tokens=24)
        await say_all(caller)
        answering = asyncio.create_task(caller.run())
        company = await asyncio.gather(*(states(system, *parts) for parts in several))
        await answering
    assert [one.data for one in company] == [one.data for one in alone]


async def test_rows_that_others_have_computed_are_computed_again_and_lent_to_nobody() -> None:
    """What is cut behind a layer has written nothing for the layers behind it."""
    parts = (0, "This is asked about every video, again and again, whatever it shows. What is it?")
    async with halves(JUDGE(), dtype=torch.float64, page_size=4) as system:
        caller = ask(system, *parts, tokens=8)
        await say_all(caller)
        await caller.run()
        before = system.decoder.scheduler.counts.rows
        got = await states(system, *parts, layers=(1,))
        rows = got.finished.usage.prompt_tokens
        assert system.decoder.scheduler.counts.rows - before == rows
        check(system, got, *parts, layers=(1,))
        system.decoder.flush()
        await system.store.flush()
        check(system, await states(system, *parts, layers=(1,)), *parts, layers=(1,))
        again = ask(system, *parts, tokens=8)
        await say_all(again)
        await again.run()
        assert again.told.finished is not None and not again.told.finished.usage.cached_prompt_tokens
    again.check_whole(JUDGE())


async def test_one_that_has_to_give_way_is_computed_again() -> None:
    parts = ("Read", 0, "the digits.")
    async with pushed(JUDGE()) as pushing:
        system = pushing.system
        caller = pooled.Embedder(system, *parts)
        caller.inner.opened.CopyFrom(opened(system, *parts, layers=(2,)))
        tensors = GatheredAll(1)
        caller.vector.add = tensors.add  # type: ignore[method-assign]
        await caller.say(2)
        running = asyncio.create_task(caller.run())
        await until(lambda: len(caller.attached) == 2)
        await until(lambda: not system.decoder.stepping.running)
        assert await pushing.push() and system.decoder.scheduler.preempted == 1
        await caller.say(1)
        await running
        got = np.frombuffer(tensors.tensors[0].buffer, np.float32).reshape(tensors.tensors[0].descriptor.shape)
        check(system, States([got], [tensors.tensors[0].descriptor], [], pb.Finished()), *parts, layers=(2,))


async def test_they_are_sent_in_the_type_that_is_asked_for_and_that_is_said() -> None:
    async with halves() as system:
        whole = torch.from_numpy((await states(system, "Q")).arrays[0].copy())
        for code, dtype in ((pb.DTYPE_BFLOAT16, torch.bfloat16), (pb.DTYPE_FLOAT16, torch.float16)):
            got = await states(system, "Q", dtype=code)
            assert {one.dtype for one in got.said} == {code}
            assert torch.equal(torch.frombuffer(bytearray(got.data[0]), dtype=dtype).view(whole.shape), whole.to(dtype))


# -- found again -------------------------------------------------------------------------------------------------------


async def test_what_was_computed_before_is_found_for_any_of_its_layers_and_type() -> None:
    async with halves() as system:
        first = await states(system, "What is it?")
        rows = system.decoder.scheduler.counts.rows
        again = await states(system, "What is it?")
        fewer = await states(system, "What is it?", layers=(2,), dtype=pb.DTYPE_FLOAT16)
        assert system.decoder.scheduler.counts.rows == rows and system.decoder.states.hits == 2
        assert again.data == first.data and len(fewer.data[0]) == len(first.data[2]) // 2
        assert again.finished.usage.cached_prompt_tokens == again.finished.usage.prompt_tokens
        for parts, layers in ((("What is it",), LAYERS), (("What is it?",), (4,))):
            await states(system, *parts, layers=layers)
        assert system.decoder.scheduler.counts.rows > rows, "another prompt, another layer"


async def test_another_tenant_finds_nothing() -> None:
    async with halves() as system:
        await states(system, "What is it?")
        rows = system.decoder.scheduler.counts.rows
        asked = opened(system, "What is it?")
        asked.tenant_root = bytes([77] * 32)
        await told(system, asked, CLOSE)
        assert system.decoder.scheduler.counts.rows == 2 * rows and not system.decoder.states.hits


async def test_a_prompt_with_media_is_found_once_its_entries_are_known() -> None:
    parts = (0, "Read the digits.")
    async with halves(JUDGE(), dtype=torch.float64) as system:
        said = await handed(system, *parts)
        first = await told(system, opened(system, *parts), *said, CLOSE)
        for message in said:  # as an encoder says what it remembers
            if isinstance(message, dpb.DecodeSized):
                keys = [one.entry.key for one in said if isinstance(one, dpb.DecodeReady)]
                for unit, key in zip(message.units, keys, strict=True):
                    unit.key = key
        rows = system.decoder.scheduler.counts.rows
        again = await told(system, opened(system, *parts), CLOSE, *said)
        assert system.decoder.scheduler.counts.rows == rows and again.data == first.data


async def test_what_is_asked_for_at_once_is_computed_once() -> None:
    async with halves() as system:
        first, *others = await asyncio.gather(*(states(system, "What is it?") for _ in range(5)))
        assert system.decoder.scheduler.counts.rows == first.finished.usage.prompt_tokens
        assert all(other.data == first.data for other in others)


async def test_who_waits_for_one_that_leaves_computes_it() -> None:
    async with halves(max_rows=1) as system:
        text = "It is said slowly, in very many pieces. " * 2
        leader = asyncio.create_task(states(system, text))
        await until(lambda: system.decoder.scheduler.counts.steps > 2)
        other = asyncio.create_task(states(system, text))
        await asyncio.sleep(0)
        leader.cancel()
        got = await other
        assert got.arrays[0].shape[0] == got.finished.usage.prompt_tokens


@pytest.mark.parametrize("what", ["header", "payload", "tag"])
async def test_any_doubt_about_a_record_is_a_miss(what: str) -> None:
    async with halves() as system:
        first = await states(system, "What is it?", layers=(2,))
        rows = system.decoder.scheduler.counts.rows
        get = system.store.get

        async def damaged(*arguments: Any, **named: Any) -> Any:
            sealed = await get(*arguments, **named)
            if sealed is None:
                return None
            changed = bytearray(getattr(sealed, what))
            changed[-1] ^= 1
            parts: dict[str, Any] = {what: memoryview(changed) if what == "payload" else bytes(changed)}
            return replace(sealed, **parts)

        system.store.get = damaged  # type: ignore[method-assign]
        again = await states(system, "What is it?", layers=(2,))
        assert system.decoder.scheduler.counts.rows == 2 * rows and system.decoder.states.rejected == 1
        assert again.data == first.data


# -- room, leaving, refusals -------------------------------------------------------------------------------------------


async def test_states_wait_for_room_in_turn_and_what_never_fits_is_refused() -> None:
    async with halves() as system:
        size = len((await states(system, "Q0", layers=(1,))).data[0])
        system.decoder.states_room = StatesRoom(2 * size)
        several = await asyncio.gather(*(states(system, f"Q{i}", layers=(1,)) for i in range(6)))
        assert all(len(one.data[0]) == size for one in several) and not system.decoder.states_room.held
        with pytest.raises(InvalidRequest) as caught:
            await states(system, "Q0", layers=(1, 2))
        assert (caught.value.reason, caught.value.facts) == ("NEVER_FITS", {"needed": 4 * size, "capacity": 2 * size})
        assert not system.decoder.states_room.held


async def test_who_waits_for_room_and_leaves_lets_the_next_one_in() -> None:
    room = StatesRoom(10)

    async def hold(size: int, entered: list[int]) -> None:
        async with room.hold(size):
            entered.append(size)
            await asyncio.sleep(3600)

    entered: list[int] = []
    first, large, small = [asyncio.create_task(hold(size, entered)) for size in (6, 9, 4)]
    await asyncio.sleep(0)
    assert entered == [6], "nobody overtakes"
    large.cancel()
    await until(lambda: entered == [6, 4])
    for task in (first, small):
        task.cancel()
    await asyncio.gather(first, large, small, return_exceptions=True)
    assert room.held == 0


@pytest.mark.parametrize("after", range(1, 8))
async def test_who_leaves_at_whatever_response_leaves_nothing(after: int) -> None:
    async with halves(JUDGE(), dtype=torch.float64, page_size=4) as system:  # which is empty at its end
        said = [opened(system, 0, "Read the digits."), *await handed(system, 0, "Read the digits."), CLOSE]
        count = 0
        async with aclosing(system.decode(*said)) as responses:
            async for _ in responses:
                count += 1
                if count == after:
                    break
        assert not system.decoder.states_room.held and not system.decoder.states._flights
        check(system, await states(system, 0, "Read the digits."), 0, "Read the digits.")


async def test_a_state_that_is_not_finite_fails_its_own_prompt_only(tmp_path: Path) -> None:
    async with halves(poisoned(tmp_path / "poisoned", "~")) as system:
        good, bad = await asyncio.gather(*(states(system, text) for text in ("Q0", "~")), return_exceptions=True)
    assert isinstance(bad, ServerError) and bad.reason == "NONFINITE" and isinstance(good, States)


REFUSED: dict[str, tuple[Callable[[dpb.DecodeOpen], Any], str]] = {
    "no layer": (lambda o: o.states.ClearField("layers"), "FIELD_MISSING"),
    "layer 0": (lambda o: o.states.layers.append(0), "FIELD_OUT_OF_RANGE"),
    "a layer behind the last": (lambda o: o.states.layers.append(99), "FIELD_OUT_OF_RANGE"),
    "a layer twice": (lambda o: o.states.layers.append(1), "FIELD_OUT_OF_RANGE"),
    "length 1": (lambda o: setattr(o.states, "normalize", True), "SAMPLING_CONFLICT"),
    "a type of integers": (lambda o: setattr(o.states, "dtype", pb.DTYPE_INT8), "FEATURE_DISABLED"),
    "a pooling nobody knows": (lambda o: setattr(o.states, "pooling", 9), "FEATURE_DISABLED"),
    "sampling": (lambda o: setattr(o.sampling, "max_tokens", 3), "SAMPLING_CONFLICT"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    change, reason = REFUSED[case]
    async with halves() as system:
        asked = opened(system, "Q")
        change(asked)
        with pytest.raises(ChiasmError) as caught:
            await told(system, asked, CLOSE)
    assert caught.value.reason == reason


async def test_a_decoder_that_is_cut_says_so_and_neither_draws_nor_pools(tmp_path: Path) -> None:
    model = Model(checkpoints_qwen3_vl.write(tmp_path / "tiny"), condition_layers=2)
    async with halves(model) as system:
        (said,) = (await system.servicer.Info(dpb.DecoderInfoRequest(), None)).models
        assert (said.layers, [*said.poolings]) == (2, [dpb.POOLING_NONE])
        assert [*said.modes] == [dpb.SAMPLE_MODE_NEVER, dpb.SAMPLE_MODE_ESTIMATE]
        assert said.text_fingerprint not in (b"", model.checkpoint.text_fingerprint)
        assert (
            said.fingerprint
            == identity_of(model.processor, fingerprint=model.checkpoint.fingerprint, dtype=torch.float32).digest()
        ), "encoders of the whole make its entries"
        await told(system, opened(system, "Q", layers=(2, 1)), CLOSE)
        with pytest.raises(InvalidRequest) as never:
            await told(system, opened(system, "Q", layers=(3,)), CLOSE)
        assert "3" in never.value.message and "1 to 2" in never.value.message
        answer, vector = system.opened("Q"), pooled.opened(system, "Q")
        for asked in (answer, vector):
            with pytest.raises(Unsupported) as caught:
                await system.told(asked, CLOSE)
            assert caught.value.reason == "OPERATION_UNSUPPORTED" and "layer 2" in caught.value.message
