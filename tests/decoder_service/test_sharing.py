"""What one question leaves behind for the next about the same video: units, and the text that was computed.

A hit gives what a miss gives. Nothing is shared between tenants, nothing that went wrong is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from chiasm.errors import ServerError
from chiasm.media.types import Rgb
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.engine import DecoderEngine, Work
from decoder_service.sequence import DecodeSequence
from tests import digits
from tests.decoder_service.halves import CLOSE, Halves, Told, halves, sized
from tests.decoder_service.test_batching import poisoned
from tests.waiting import until

LONG = "This is said before every question, whatever it is about. " * 3
TOKENS = 5
"""Visual tokens of a frame."""


def clip(count: int, seed: int = 3) -> list[Rgb]:
    rng = np.random.default_rng(seed)
    cells = digits.held_out_digits()
    return [digits.frame(cells[seed * 31 + i][0], rng) for i in range(count)]


class Attached(DecoderEngine):
    """An engine that counts what is really copied into it, and the rows that it computes."""

    copied: int
    rows: int

    def attach(self, *arguments: object) -> None:
        before = self.extents.free + self.holdings.kept.visual
        super().attach(*arguments)  # type: ignore[arg-type]
        self.copied += before - self.extents.free - self.holdings.kept.visual

    def step(self, batch: Sequence[Work]) -> list[torch.Tensor]:
        self.rows += sum(work.rows for work in batch)
        return super().step(batch)


def counted(system: Halves) -> Attached:
    engine = system.decoder.engine
    engine.__class__ = Attached
    assert isinstance(engine, Attached)
    engine.copied = engine.rows = 0
    return engine


async def ask(
    system: Halves, frames: Sequence[Rgb], *parts: str | int, root: bytes | None = None, known: bool = False
) -> Told:
    """One question about one video, greedy.

    Args:
        known: the keys of its units are told with its sizes, before any is handed over.
    """
    messages = await system.ready(frames) if 0 in parts else []
    opened = system.opened(*parts, max_tokens=12)
    opened.sampling.ignore_eos = True
    opened.tenant_root = root or opened.tenant_root
    sizes = sized(len(messages))
    if known:
        for unit, ready in zip(sizes.units, messages, strict=True):
            unit.key = ready.entry.key
    return await system.told(opened, *([sizes] if messages else []), *messages, CLOSE)


def cached(told: Told) -> int:
    assert told.finished is not None and told.finished.usage.HasField("cached_prompt_tokens")
    return told.finished.usage.cached_prompt_tokens


# -- what is shared ----------------------------------------------------------------------------------------------------


async def test_a_second_question_about_a_video_copies_nothing_and_computes_only_what_is_new() -> None:
    frames = clip(6)
    async with halves(dtype=torch.float64) as system:
        engine = counted(system)
        cold = await ask(system, frames, 0, LONG + "Read the digits.")
        assert engine.copied == 6 * TOKENS and cached(cold) == 0
        assert engine.holdings.kept.visual == 6 * TOKENS, "nobody holds them, and they are there"
        rows, engine.rows = engine.rows, 0
        other = await ask(system, frames, 0, LONG + "Which digit is at 2.0 seconds?")
        assert engine.copied == 6 * TOKENS
        assert cached(other) > 0.7 * rows and engine.rows < 0.4 * rows
        assert other.finished is not None
        assert engine.rows == other.finished.usage.prompt_tokens - cached(other) + 11, "the last token is not computed"
        system.decoder.flush()
        assert engine.holdings.kept == (0, 0)
        again = await ask(system, frames, 0, LONG + "Which digit is at 2.0 seconds?")
        assert cached(again) == 0 and engine.copied == 12 * TOKENS
    assert again.ids == other.ids
    assert other.finished.usage.prompt_tokens == (again.finished or other.finished).usage.prompt_tokens


async def test_a_conversation_that_goes_on_computes_neither_its_video_nor_its_first_answer_again() -> None:
    frames = clip(4)
    async with halves(dtype=torch.float64) as system:
        engine = counted(system)
        first = await ask(system, frames, 0, LONG)
        messages = await system.ready(frames)

        async def follow_up() -> Told:
            opened = system.opened(0, LONG, max_tokens=6)
            opened.prompt.conversation.turns.add(role=pb.ROLE_ASSISTANT).parts.add(text=first.text.decode())
            opened.prompt.conversation.turns.add(role=pb.ROLE_USER).parts.add(text="And then?")
            return await system.told(opened, sized(4), *messages, CLOSE)

        hit = await follow_up()
        assert first.finished is not None
        page = engine.pages.page_size
        assert cached(hit) >= first.finished.usage.prompt_tokens // page * page
        system.decoder.flush()
        messages = await system.ready(frames)
        miss = await follow_up()
    assert (hit.ids, cached(miss)) == (miss.ids, 0)


async def test_units_that_are_known_before_they_are_made_need_not_be_made() -> None:
    """The caller is told with `admitted`, and the answer comes without a single entry."""
    frames = clip(3)
    async with halves() as system:
        cold = await ask(system, frames, 0, "Read the digits.")
        keys = [ready.entry.key for ready in await system.ready(frames)]
        for key in system.store.held():
            await system.store.discard(key)
        sizes = sized(3)
        for unit, key in zip(sizes.units, keys, strict=True):
            unit.key = key
        opened = system.opened(0, "Read the digits.", max_tokens=12)
        opened.sampling.ignore_eos = True
        told = await system.told(opened, sizes, CLOSE)
        assert told.admitted is not None
        assert [(ref.slot, ref.unit) for ref in told.admitted.held] == [(0, 0), (0, 1), (0, 2)]
        assert told.ids == cold.ids
        assert cold.admitted is not None and not cold.admitted.held


async def test_a_unit_that_was_held_and_has_moved_is_asked_for() -> None:
    """A video ahead of it turned out shorter: what was held lies elsewhere now, and nobody has made it."""
    frames, still = clip(3), clip(1, seed=5)
    async with halves() as system:
        entries = [await system.ready(frames), await system.ready(still, slot=1)]
        whole = system.opened(0, "and", 1, "Read the digits.", max_tokens=8)
        await system.told(whole, sized(3), sized(1, slot=1), *entries[0], *entries[1], CLOSE)
        entries = [await system.ready(frames[:2]), await system.ready(still, slot=1)]
        early, late, second = sized(3, final=False), sized(2, of=3, revision=2), sized(1, slot=1)
        second.units[0].key = entries[1][0].entry.key
        inbox: asyncio.Queue[dpb.DecodeRequest] = asyncio.Queue()

        async def requests() -> AsyncIterator[dpb.DecodeRequest]:
            while True:
                yield await inbox.get()

        for message in (
            dpb.DecodeRequest(open=system.opened(0, "and", 1, "Read the digits.", max_tokens=8)),
            dpb.DecodeRequest(sized=early),
            dpb.DecodeRequest(sized=second),
            dpb.DecodeRequest(close=CLOSE),
        ):
            inbox.put_nowait(message)
        told = Told()
        async with aclosing(system.servicer.Decode(requests(), None)) as responses:  # type: ignore[type-var]
            async for response in responses:
                told.note(response)
                if response.HasField("admitted"):
                    assert [ref.slot for ref in response.admitted.held] == [1]
                    inbox.put_nowait(dpb.DecodeRequest(sized=late))
                    for ready in entries[0]:
                        inbox.put_nowait(dpb.DecodeRequest(ready=ready))
                if response.HasField("missing"):
                    assert (response.missing.unit.slot, response.missing.cause) == (1, "stale")
                    inbox.put_nowait(dpb.DecodeRequest(ready=entries[1][0]))
        system.decoder.flush()
        entries = [await system.ready(frames[:2]), await system.ready(still, slot=1)]
        fresh = await system.told(
            system.opened(0, "and", 1, "Read the digits.", max_tokens=8),
            sized(2, of=3),
            sized(1, slot=1),
            *entries[0],
            *entries[1],
            CLOSE,
        )
    assert told.ids == fresh.ids and told.ids


# -- room --------------------------------------------------------------------------------------------------------------


async def test_questions_about_one_video_run_together_where_it_fits_only_once() -> None:
    frames = clip(6)
    async with halves(visual_tokens=6 * TOKENS) as system:
        alone = await ask(system, frames, 0, "Read the digits.")
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, system.decoder.running)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*(ask(system, frames, 0, "Read the digits.", known=True) for _ in range(6)))
        watching.cancel()
        await asyncio.wait([watching])
        assert most == 6
    assert all(told.ids == alone.ids for told in answers)


async def test_what_is_kept_makes_room_for_what_is_asked() -> None:
    clips = [clip(6, seed) for seed in range(4)]
    async with halves(visual_tokens=8 * TOKENS, text_tokens=160) as system:
        told = [await ask(system, frames, 0, "Read the digits.") for frames in clips for _ in range(2)]
        held = system.decoder.engine.holdings
        assert held.held == (0, 0) and 6 * TOKENS <= held.kept.visual <= 8 * TOKENS
    async with halves() as roomy:
        expected = [await ask(roomy, frames, 0, "Read the digits.") for frames in clips]
    assert [t.ids for t in told[::2]] == [t.ids for t in told[1::2]] == [t.ids for t in expected]
    assert all(cached(t) for t in told[1::2])


# -- what is not shared ------------------------------------------------------------------------------------------------


async def test_tenants_share_nothing() -> None:
    async with halves() as system:
        first = await ask(system, [], LONG)
        stranger = await ask(system, [], LONG, root=bytes(31) + b"x")
        again = await ask(system, [], LONG)
    assert first.ids == stranger.ids == again.ids
    assert cached(stranger) == 0 < cached(again)


async def test_a_video_at_another_place_is_attached_there() -> None:
    frames = clip(3)
    async with halves(dtype=torch.float64) as system:
        engine = counted(system)
        await ask(system, frames, 0, "Read the digits.")
        behind = await ask(system, frames, "Read the digits.", 0)
        assert engine.copied == 6 * TOKENS
        system.decoder.flush()
        assert (await ask(system, frames, "Read the digits.", 0)).ids == behind.ids


async def test_what_failed_leaves_nothing_that_others_would_find(tmp_path: Path) -> None:
    async with halves(poisoned(tmp_path / "poisoned", "~")) as system:
        with pytest.raises(ServerError):
            await ask(system, clip(2), 0, LONG + "~")
        assert system.decoder.engine.holdings.kept == (0, 0)
        assert (await ask(system, clip(2), 0, LONG)).ids


async def test_who_leaves_at_any_moment_leaves_only_what_is_kept() -> None:
    """A caller that leaves after each of its responses in turn; others ask the same meanwhile."""
    frames = clip(3)
    async with halves() as system:
        expected = await ask(system, frames, 0, "Read the digits.")
        holdings = system.decoder.engine.holdings
        for left_after in range(1, 9):
            messages = await system.ready(frames)
            opened = system.opened(0, "Read the digits.", max_tokens=12)
            leaving = system.decode(opened, sized(3), *messages, CLOSE)
            other = asyncio.create_task(ask(system, frames, 0, "Read the digits."))
            async with aclosing(leaving):
                for _ in range(left_after):
                    await anext(leaving)
            assert (await other).ids == expected.ids
            await until(lambda: holdings.held == (0, 0))
            assert holdings.promised == (0, 0)
            if left_after % 3 == 0:
                system.decoder.flush()


# -- logits ------------------------------------------------------------------------------------------------------------


async def test_the_logits_of_a_hit_are_those_of_a_miss() -> None:
    """Row by row in float64, behind a prefix that another sequence has computed in other pieces."""
    async with halves(dtype=torch.float64) as system:
        engine = system.decoder.engine
        rng = np.random.default_rng(1)
        ids = rng.integers(3, 60, size=90).tolist()

        def laid(domain: bytes | None) -> DecodeSequence:
            made = engine.sequence(domain)
            made.extend([ids])
            return made

        maker, miss, hit = laid(b"d" * 32), laid(None), laid(b"d" * 32)
        for rows in (7, 20, 1, 30, 32):
            engine.step([Work(maker, rows, "none")])
            engine.holdings.share(maker)
        engine.release(maker)
        engine.holdings.share(hit)
        assert hit.computed == 80
        (whole,) = engine.step([Work(miss, 90, "all")])
        (rest,) = engine.step([Work(hit, 10, "all")])
        engine.release(miss)
        engine.release(hit)
    assert torch.allclose(rest, whole[80:], rtol=0, atol=1e-12 * float(whole.abs().max()))
