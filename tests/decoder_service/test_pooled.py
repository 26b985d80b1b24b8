"""Timelines that sample nothing: the state of the last row is that of an undivided pass, whatever is computed beside it
and however it came to be computed, and nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

from chiasm.errors import ChiasmError, InvalidRequest, ServerError
from chiasm.rpc.tensor import Gathered
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import Timeline
from decoder_service.engine import DecoderEngine, Work
from tests.decoder_service.halves import CLOSE, Halves, Message, halves, sized
from tests.decoder_service.oracle import Clip, Oracle, Replay
from tests.decoder_service.test_batching import poisoned
from tests.decoder_service.test_preempting import ask, flush_all, flush_nothing, pushed, say_all
from tests.decoder_service.test_sharing import counted
from tests.fuzz.timelines import frames, oracle
from tests.waiting import until

JUDGE: Callable[[], Oracle] = partial(oracle, "random")
ROUNDING = 1e-6
"""What float32 leaves of numbers of about 1."""

CLIPS = {
    0: Clip(frames(0)[:3], [0.0, 1.0, 2.0]),
    1: Clip(frames(1)[:1], [0.0], pb.MEDIA_KIND_IMAGE),
    2: Clip(frames(1)[1:3], [0.0, 1.0]),
}
PROMPTS: dict[str, tuple[str | int, ...]] = {
    "text": ("What is it?",),
    "one token": ("Q",),
    "an image": (1, "What is it?"),
    "a video": ("Read", 0, "the digits."),
    "a video at the end": ("Read the digits.", 0),
    "mixed": (0, "and", 1, "and", 2, "are alike?"),
}
Numbers: TypeAlias = npt.NDArray[np.float32]


class Vector(NamedTuple):
    """What a call was told: the numbers as they were sent, and the rest."""

    data: bytes
    said: pb.TensorDescriptor
    started: pb.Started
    finished: pb.Finished

    @property
    def numbers(self) -> Numbers:
        return np.frombuffer(self.data, dtype=np.float32)


def opened(system: Halves, *parts: str | int, normalize: bool = False, dtype: int = 0) -> dpb.DecodeOpen:
    asked = system.opened(*parts)
    for slot in asked.slots:
        slot.kind = CLIPS[slot.slot].kind
    asked.sample = dpb.SAMPLE_MODE_NEVER
    asked.states.pooling, asked.states.normalize = dpb.POOLING_LAST, normalize
    asked.states.dtype = dtype  # type: ignore[assignment]
    return asked


async def handed(system: Halves, *parts: str | int) -> list[Message]:
    """What is said of the media of a prompt, all of it."""
    said: list[Message] = []
    for slot in (part for part in parts if isinstance(part, int)):
        said += [sized(len(CLIPS[slot].frames), slot=slot), *await system.ready(CLIPS[slot].frames, slot=slot)]
    return said


async def told(system: Halves, *messages: Message) -> Vector:
    vector = Gathered()
    started = finished = None
    async with aclosing(system.decode(*messages)) as responses:
        async for response in responses:
            which = response.WhichOneof("message")
            assert which in ("admitted", "attached", "started", "states", "finished"), which
            if which == "states":
                assert started is not None, "its frames and its digest come first"
                vector.add(response.states)
            elif which == "started":
                started = response.started
            elif which == "finished":
                finished = response.finished
    assert vector.whole and started is not None and finished is not None
    return Vector(vector.data, vector.descriptor, started, finished)


async def embedded(system: Halves, *parts: str | int, normalize: bool = False, dtype: int = 0) -> Vector:
    asked = opened(system, *parts, normalize=normalize, dtype=dtype)
    return await told(system, asked, *await handed(system, *parts), CLOSE)


def expected(system: Halves, *parts: str | int, judge: Oracle | None = None) -> npt.NDArray[np.float64]:
    """Of an undivided float64 pass with dense attention."""
    judge = judge or JUDGE()
    replay = Replay(judge, opened(system, *parts), CLIPS)
    replay.lay_prompt()
    state: npt.NDArray[np.float64] = judge.states(replay.timeline, CLIPS)[-1].numpy()
    return state


def close(got: Numbers, wanted: npt.NDArray[np.float64], rounding: float = ROUNDING) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=rounding * float(np.abs(wanted).max()))


# -- what it is --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_it_is_the_state_of_the_last_row_of_an_undivided_pass(prompt: str) -> None:
    parts = PROMPTS[prompt]
    async with halves(JUDGE(), dtype=torch.float64, page_size=4) as system:
        vector = await embedded(system, *parts)
        wanted = expected(system, *parts)
    close(vector.numbers, wanted)
    said = vector.said
    assert (said.name, said.dtype, [*said.shape]) == ("embedding", pb.DTYPE_FLOAT32, [len(wanted)])
    usage, end = vector.finished.usage, vector.finished
    replay = Replay(JUDGE(), opened(system, *parts), CLIPS)
    replay.lay_prompt()
    assert (usage.prompt_tokens, usage.visual_tokens) == (len(replay.timeline), replay.timeline.vision_tokens)
    assert (end.reason, end.tokens, usage.output_tokens) == (pb.FINISH_REASON_CLOSED, 0, 0)
    assert vector.started.prompt_tokens == len(replay.timeline)
    assert len(vector.started.frames) == sum(len(CLIPS[part].frames) for part in parts if isinstance(part, int))


@pytest.mark.parametrize("prompt", ["text", "a video", "mixed"])
async def test_the_shipped_model_in_float32_gives_what_float64_gives(prompt: str) -> None:
    parts = PROMPTS[prompt]
    async with halves() as system:
        close((await embedded(system, *parts)).numbers, expected(system, *parts, judge=oracle("digits")), 1e-5)


async def test_a_plain_prompt_is_laid_without_a_template() -> None:
    async with halves(JUDGE(), dtype=torch.float64) as system:
        asked = opened(system)
        asked.prompt.plain.parts.add(tokens=pb.TokenRun(ids=[5, 9, 2]))
        vector = await told(system, asked, CLOSE)
    timeline = Timeline()
    timeline.append_text([5, 9, 2])
    close(vector.numbers, JUDGE().states(timeline, {})[-1].numpy())
    assert vector.finished.usage.prompt_tokens == 3


@pytest.mark.parametrize("prompt", ["text", "mixed"])
async def test_it_has_length_1_where_that_is_asked_for(prompt: str) -> None:
    parts = PROMPTS[prompt]
    async with halves(JUDGE(), dtype=torch.float64) as system:
        vector = await embedded(system, *parts, normalize=True)
        wanted = expected(system, *parts)
    assert abs(np.linalg.norm(vector.numbers.astype(np.float64)) - 1) < 1e-6 < abs(np.linalg.norm(wanted) - 1)
    close(vector.numbers, wanted / np.linalg.norm(wanted))


async def test_it_is_sent_in_the_type_that_is_asked_for() -> None:
    async with halves() as system:
        whole = torch.from_numpy((await embedded(system, "Q")).numbers.copy())
        for code, dtype in ((pb.DTYPE_BFLOAT16, torch.bfloat16), (pb.DTYPE_FLOAT16, torch.float16)):
            vector = await embedded(system, "Q", dtype=code)
            assert vector.said.dtype == code
            got = torch.frombuffer(bytearray(vector.data), dtype=dtype)
            assert torch.equal(got, whole.to(dtype))


async def test_a_model_in_16_bits_sends_what_it_computed_where_nothing_is_said() -> None:
    async with halves(dtype=torch.bfloat16) as system:
        vector = await embedded(system, "Q")
        whole = await embedded(system, "Q", dtype=pb.DTYPE_FLOAT32)
    assert vector.said.dtype == pb.DTYPE_BFLOAT16
    got = torch.frombuffer(bytearray(vector.data), dtype=torch.bfloat16).float()
    assert got.tolist() == whole.numbers.tolist()


# -- in company --------------------------------------------------------------------------------------------------------


class Mixed(DecoderEngine):
    """An engine that notes which steps had to give states and logits both."""

    mixed: int

    def step(self, batch: Sequence[Work]) -> list[torch.Tensor]:
        asked = {work.states for work in batch if work.wanted != "none"}
        self.mixed += len(asked) > 1
        return super().step(batch)


def watched(system: Halves) -> Mixed:
    engine = system.decoder.engine
    engine.__class__ = Mixed
    assert isinstance(engine, Mixed)
    engine.mixed = 0
    return engine


@pytest.mark.parametrize("rows", [512, 12], ids=["whole", "in pieces"])
async def test_in_a_batch_of_many_beside_answers_each_is_its_own(rows: int) -> None:
    async with halves(JUDGE(), dtype=torch.float64, page_size=4, max_rows=rows) as system:
        engine = watched(system)
        callers = [ask(system, *([0] if i % 2 else []), f"Q{i}", tokens=40, seed=i) for i in range(4)]
        answering = [asyncio.create_task(caller.run()) for caller in callers]
        for caller in callers:
            await say_all(caller)
        await until(lambda: all(caller.told.ids for caller in callers))
        several = [*PROMPTS.values()] * 3
        vectors = await asyncio.gather(*(embedded(system, *parts) for parts in several))
        await asyncio.gather(*answering)
        assert engine.mixed, "some were computed in one step with answers"
        for parts, vector in zip(several, vectors, strict=True):
            close(vector.numbers, expected(system, *parts))
    for caller in callers:
        caller.check_whole(JUDGE())


async def test_where_decoders_are_deterministic_it_is_the_same_to_the_last_bit_in_any_company() -> None:
    several = [*PROMPTS.values()]
    async with halves(deterministic=True, page_size=4) as system:
        alone = []
        for parts in several:
            alone.append(await embedded(system, *parts))
            system.decoder.flush()
        caller = ask(system, 0, "Read the digits.", tokens=24)
        await say_all(caller)
        await caller.run()
        system.decoder.flush()
        again = ask(system, 0, "Read the digits.", tokens=24)
        await say_all(again)
        answering = asyncio.create_task(again.run())
        await until(lambda: bool(again.told.ids))
        company = await asyncio.gather(*(embedded(system, *parts) for parts in several))
        await answering
    assert [one.data for one in company] == [one.data for one in alone]
    assert again.told.ids == caller.told.ids and again.logprobs == caller.logprobs, "nor is the answer another one"
    async with halves(deterministic=True, page_size=4, max_rows=7) as system:
        pieces = await asyncio.gather(*(embedded(system, *parts) for parts in several))
    assert [one.data for one in pieces] == [one.data for one in alone]


async def test_what_others_have_computed_is_found_and_the_last_row_is_computed() -> None:
    parts = (0, "This is asked about every video, again and again, whatever it shows. What is it?")
    async with halves(JUDGE(), dtype=torch.float64, page_size=4) as system:
        engine = counted(system)
        first = await embedded(system, *parts)
        assert first.finished.usage.cached_prompt_tokens == 0
        engine.rows = engine.copied = 0
        again = await embedded(system, *parts)
        spared = again.finished.usage.cached_prompt_tokens
        assert engine.copied == 0 and 0 < engine.rows == again.finished.usage.prompt_tokens - spared <= 4
        close(again.numbers, expected(system, *parts))
        caller = ask(system, *parts, tokens=8)
        await say_all(caller)
        await caller.run()
        assert caller.told.finished is not None and caller.told.finished.usage.cached_prompt_tokens >= spared
    caller.check_whole(JUDGE())


@pytest.mark.parametrize("flush", [flush_nothing, flush_all])
async def test_one_that_has_to_give_way_is_computed_again(flush: Callable[[Halves], Awaitable[None]]) -> None:
    parts = ("Read", 0, "the digits.")
    async with pushed(JUDGE()) as pushing:
        system = pushing.system
        caller = Embedder(system, *parts)
        await caller.say(2)
        running = asyncio.create_task(caller.run())
        await until(lambda: len(caller.attached) == 2)
        await until(lambda: not system.decoder.stepping.running)
        await flush(system)
        assert await pushing.push() and system.decoder.scheduler.preempted == 1
        await caller.say(1)
        await running
        close(caller.numbers, expected(system, *parts))
        assert len(caller.attached) >= 4, "units are attached again"


class Embedder:
    """A caller that hands over unit by unit, and again what it is asked for again."""

    def __init__(self, system: Halves, *parts: str | int) -> None:
        self.inner = ask(system, *parts)
        self.inner.clips = {part: CLIPS[part] for part in parts if isinstance(part, int)}
        self.inner.opened.CopyFrom(opened(system, *parts))
        self.vector = Gathered()
        self._said = 0

    @property
    def attached(self) -> list[tuple[int, int]]:
        return self.inner.attached

    @property
    def numbers(self) -> Numbers:
        assert self.vector.whole
        return np.frombuffer(self.vector.data, dtype=np.float32)

    async def say(self, units: int) -> None:
        """Hands over so many more units of its one medium; says all else before the first."""
        if not self._said:
            self.inner.send(sized(len(CLIPS[0].frames)), CLOSE)
        for unit in range(self._said, self._said + units):
            await self.inner.hand_over(0, unit)
        self._said += units

    async def run(self, *, leave_after: int | None = None) -> None:
        note = self.inner.note

        async def noted(response: dpb.DecodeResponse) -> None:
            if response.HasField("states"):
                self.vector.add(response.states)
            await note(response)

        self.inner.note = noted  # type: ignore[method-assign]
        await self.inner.run(leave_after=leave_after)


# -- leaving, and what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(1, 6))
async def test_who_leaves_at_whatever_response_leaves_nothing(after: int) -> None:
    async with halves(JUDGE(), dtype=torch.float64, page_size=4) as system:  # which is empty at its end
        caller = Embedder(system, 0, "Read the digits.")
        await caller.say(3)
        await caller.run(leave_after=after)
        assert caller.inner.responses == after and caller.vector.whole == (after > 3)
        close((await embedded(system, *PROMPTS["mixed"])).numbers, expected(system, *PROMPTS["mixed"]))


async def test_who_is_cancelled_while_a_step_runs_or_units_are_missing_leaves_nothing() -> None:
    async with halves(JUDGE(), dtype=torch.float64, page_size=4, max_rows=4) as system:
        for units in (0, 1, 2):
            caller = Embedder(system, 0, "Read the digits.")
            await caller.say(units)
            running = asyncio.create_task(caller.run())
            await until(lambda: caller.inner.told.admitted is not None)  # noqa: B023 - awaited here
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        steps = system.decoder.scheduler.counts.steps
        slow = asyncio.create_task(embedded(system, "It is said slowly, in very many pieces. " * 4))
        await until(lambda: system.decoder.scheduler.counts.steps > steps + 2)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow


async def test_a_prompt_may_fill_the_context_and_not_a_token_more() -> None:
    async with halves() as system:
        limit = system.decoder.context_limit

        def long(tokens: int) -> dpb.DecodeOpen:
            asked = opened(system)
            asked.prompt.plain.parts.add(tokens=pb.TokenRun(ids=[5] * tokens))
            return asked

        vector = await told(system, long(limit), CLOSE)
        assert vector.finished.usage.prompt_tokens == limit
        with pytest.raises(InvalidRequest) as caught:
            await told(system, long(limit + 1), CLOSE)
        assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED" and caught.value.facts["needed"] == limit + 1
        parts = ("1 " * (limit // 2 - 8), 0)
        with pytest.raises(InvalidRequest) as caught:
            await embedded(system, *parts)
        assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED" and "answer" not in caught.value.message


async def test_a_state_that_is_not_finite_fails_its_own_row_only(tmp_path: Path) -> None:
    async with halves(poisoned(tmp_path / "poisoned", "~")) as system:
        healthy = await embedded(system, "Q0")
        good, bad, other = await asyncio.gather(
            *(embedded(system, text) for text in ("Q0", "~", "Q0")), return_exceptions=True
        )
    assert isinstance(bad, ServerError) and bad.reason == "NONFINITE"
    for one in (good, other):
        assert isinstance(one, Vector)
        np.testing.assert_allclose(one.numbers, healthy.numbers, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Callable[[dpb.DecodeOpen], Any], str, str]] = {
    "nothing of its states": (lambda o: o.ClearField("states"), "FIELD_MISSING", "states"),
    "every state of no layer": (lambda o: setattr(o.states, "pooling", dpb.POOLING_NONE), "FIELD_MISSING", "layers"),
    "a layer": (lambda o: o.states.layers.append(2), "FEATURE_DISABLED", "layers"),
    "another type": (lambda o: setattr(o.states, "dtype", pb.DTYPE_INT8), "FEATURE_DISABLED", "dtype"),
    "sampling": (lambda o: setattr(o.sampling, "max_tokens", 3), "SAMPLING_CONFLICT", "sampling"),
    "tokens so far": (lambda o: o.emitted.add(sequence=0, ids=[4]), "FEATURE_DISABLED", "emitted"),
    "an adapter": (lambda o: setattr(o, "adapter", "a"), "FEATURE_DISABLED", "adapter"),
    "an answer": (lambda o: setattr(o, "sample", dpb.SAMPLE_MODE_WHEN_CLOSED), "SAMPLING_CONFLICT", "states"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    change, reason, field = REFUSED[case]
    async with halves() as system:
        asked = opened(system, "Q")
        change(asked)
        with pytest.raises(ChiasmError) as caught:
            await told(system, asked, CLOSE)
    assert (caught.value.reason, caught.value.facts) == (reason, {"field": field})
