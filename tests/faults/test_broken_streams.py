"""Answers whose decoder or router is lost in the middle, asked through the SDK of a whole system: every token comes
once, and is the one that would have come in peace."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from chiasm import AsyncClient, Finished, SamplingParams, Token
from chiasm.cache.arena import ArenaStore
from chiasm.cache.region import Region
from chiasm.client import Content, ResumePoint
from chiasm.errors import ConnectionFailed, Unavailable
from router.computing import ATTEMPTS
from tests.faults.clips import FRAMES, unseen
from tests.faults.injectors import injected
from tests.faults.injectors.points import Points
from tests.faults.injectors.processes import Kill, Stop
from tests.processes import Role, Trio, trio
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)

TOKENS = 400
"""So many that an answer is not over when its reader has seen `AT` of them."""

AT = 12

ON = SamplingParams(ignore_eos=True, temperature=0.8, seed=11)
"""Answers go on behind their end, so that all are of one length."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """An encoder, two decoders and two routers. A test that hurts one leaves it as it was."""
    with trio(
        tmp_path_factory.mktemp("wide"),
        decoders=2,
        routers=2,
        encoder=["--lease-seconds", "2"],
        decoder=["--deterministic"],
    ) as made:
        yield made


@dataclass
class Heard:
    """What a reader was told of one answer.

    Attributes:
        quiet: indices of tokens that came without text: in the middle of a character, or of what may be a stop string.
        ends: how often it ended, which is once.
        resumes: how often the SDK went on with it.
        point: where it can be gone on with, when it broke or was left.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    quiet: list[int] = field(default_factory=list)
    ends: int = 0
    reason: str = ""
    resumes: int = 0
    point: ResumePoint | None = None

    def note(self, event: object, first: int) -> None:
        assert not self.ends, "something came behind the end"
        if isinstance(event, Token):
            if event.ids:
                assert event.index == first + len(self.ids), "each once, and in order"
            if event.ids and not event.text:
                self.quiet.append(event.index)
            self.ids += event.ids
            self.text += event.text
        elif isinstance(event, Finished):
            self.ends += 1
            self.reason = str(event.reason)

    @property
    def answer(self) -> tuple[list[int], str, str, int]:
        return self.ids, self.text, self.reason, self.ends


async def asked(
    client: AsyncClient,
    content: Content,
    *,
    heard: Heard | None = None,
    sampling: SamplingParams = ON,
    tokens: int = TOKENS,
    resume: ResumePoint | None = None,
    leave_at: int | None = None,
) -> Heard:
    """An answer, heard to its end, or until so many tokens were told."""
    heard = heard or Heard()
    first = len(resume.ids) if resume else 0
    options: dict[str, Any] = {"resume": resume} if resume else {}
    async with client.stream("digits", content, max_tokens=tokens, timeout=120, sampling=sampling, **options) as stream:
        try:
            async for event in stream:
                heard.note(event, first)
                heard.point = stream.resume_point
                if leave_at is not None and len(heard.ids) >= leave_at:
                    break
        finally:
            heard.point = heard.point or stream.resume_point
            heard.resumes = stream.resumes
    return heard


async def begun(task: asyncio.Task[Heard], heard: Heard, at: int = AT) -> None:
    """Waits until an answer has come so far. It is not over."""
    await until(lambda: len(heard.ids) >= at or task.done(), seconds=60)
    assert not task.done(), "it was over too soon for anything to happen to it"


@asynccontextmanager
async def alone(served: Trio) -> AsyncIterator[Role]:
    """The first decoder, while the second one is dead. Both run when the block has ended."""
    other = served.decoders[1]
    await asyncio.to_thread(other.kill)
    try:
        yield served.decoder
    finally:
        for role in served.decoders:
            await back(role)


def replaced(served: Trio) -> float:
    """Decoders that went on with an answer of the first router that another had begun."""
    return served.router.counted()["chiasm_resumes_total"]


async def serving(served: Trio) -> Role:
    """The router that is asked just now: a client that knows two asks whoever was ready first."""

    def found() -> list[Role]:
        return [role for role in served.routers if role.counted()["chiasm_num_requests_running"]]

    (router,) = await asyncio.to_thread(found)
    return router


@asynccontextmanager
async def clients(*targets: str | list[str], **options: Any) -> AsyncIterator[list[AsyncClient]]:
    """Who is asked only where a router is known to be there: one that was killed before may have been called gone."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(AsyncClient(one, max_retries=0, **options)) for one in targets]
        for client in made:
            await client.wait_ready()
        yield made


async def back(role: Role) -> None:
    """Starts a role that has ended, and waits until it serves."""
    if role.code is not None:
        role.start()
    await asyncio.to_thread(role.wait_for, "ready")


@pytest.mark.chaos
async def test_a_decoder_that_is_frozen_and_replaced_is_not_heard_when_it_wakes(wide: Trio) -> None:
    """M12"""
    content = unseen()
    async with clients(wide.target, max_resumes=0) as (client,):
        whole, before = await asked(client, content), replaced(wide)
        async with alone(wide) as sleeper:
            heard = Heard()
            asking = asyncio.create_task(asked(client, content, heard=heard))
            await begun(asking, heard)
            async with injected(Stop(sleeper.pid)):
                wide.decoders[1].start()
                await until(lambda: len(heard.ids) > TOKENS // 2, seconds=60)
                assert not asking.done()
            await asking
    assert heard.answer == whole.answer
    assert replaced(wide) - before == 1
    await wide.settled(seconds=45)
    assert sleeper.code is None


async def emptied(served: Trio) -> None:
    """Returns when no entry is left in the region: a dead decoder's pins have to be found out first."""
    with closing(await asyncio.to_thread(Region.open, served.arenas[0])) as region:
        store = ArenaStore(region, patience=5.0)
        end = time.monotonic() + 30
        while store.stats().entries:
            assert time.monotonic() < end, "somebody still holds some"
            await store.flush()
            await asyncio.sleep(0.05)


@pytest.mark.chaos
async def test_a_decoder_killed_and_the_entries_gone_all_are_encoded_once_more_and_no_token_is_lost(
    wide: Trio,
) -> None:
    """M13"""
    content = unseen()

    def encoded() -> float:
        return wide.encoder.counted()["chiasm_encoder_units_total:encoded"]

    async with clients(wide.target, max_resumes=0) as (client,):
        whole = await asked(client, content)
        async with alone(wide) as decoder:
            heard, made, before = Heard(), encoded(), replaced(wide)
            asking = asyncio.create_task(asked(client, content, heard=heard))
            await begun(asking, heard)
            async with injected(Kill(decoder.pid)):
                await asyncio.to_thread(decoder.kill)  # reaps it
                await emptied(wide)
            await back(decoder)
            await asking
    assert heard.answer == whole.answer
    assert replaced(wide) - before == 1
    assert encoded() - made == FRAMES
    await wide.settled(seconds=45)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_an_answer_whose_decoders_die_again_and_again_is_given_up_and_its_point_is_still_good(
    wide: Trio,
) -> None:
    """M14: each life of the decoder gives some tokens, so the answer is not at fault."""
    content = unseen()
    async with clients(wide.target, max_resumes=0) as (client,):
        whole = await asked(client, content)
        async with alone(wide) as decoder:
            point = Points(decoder, f"Decode/tokens=exit@{AT}")
            await asyncio.to_thread(point.inject)
            heard = Heard()
            try:
                asking = asyncio.create_task(asked(client, content, heard=heard))
                lives = 0
                while not asking.done():
                    await until(lambda: asking.done() or decoder.code is not None, seconds=60)
                    if decoder.code is not None:
                        await asyncio.to_thread(point.verify)
                        lives += 1
                        await back(decoder)
                with pytest.raises(Unavailable) as caught:
                    await asking
            finally:
                await asyncio.to_thread(point.end)
            assert (caught.value.reason, lives) == ("DECODER_LOST", ATTEMPTS)
            assert heard.ids == whole.ids[: ATTEMPTS * (AT - 1)] and heard.point is not None
            rest = await asked(client, content, resume=heard.point)
    assert heard.ids + rest.ids == whole.ids and heard.text + rest.text == whole.text and rest.ends == 1
    await wide.settled(seconds=45)


CHARACTERS = SamplingParams(regex="(é|ü|😀){4,9}\\.", temperature=20.0, seed=3)


async def characters(client: AsyncClient, content: Content) -> SamplingParams:
    """An answer of characters of several tokens each."""
    return CHARACTERS


async def stop_string(client: AsyncClient, content: Content) -> SamplingParams:
    """An answer that ends with a stop string of several tokens."""
    free = await asked(client, content, tokens=AT * 4, sampling=ON)
    return replace(ON, stop=[free.text[AT : AT + 5]])


@pytest.mark.chaos
@pytest.mark.parametrize("kind", [characters, stop_string])
async def test_a_decoder_killed_inside_a_character_or_a_stop_string_costs_no_byte(
    wide: Trio, kind: Callable[[AsyncClient, Content], Awaitable[SamplingParams]]
) -> None:
    """M17, and M16: a guide is replayed."""
    content = unseen()
    async with clients(wide.target, max_resumes=0) as (client,):
        sampling = await kind(client, content)
        whole = await asked(client, content, sampling=sampling, tokens=AT * 8)
        inside = [index for index in whole.quiet if index + 1 < len(whole.ids)]
        assert whole.reason.endswith("stop") and inside, whole
        before = replaced(wide)
        async with alone(wide) as decoder:
            # What was sent before it ends the text in the middle.
            point = Points(decoder, f"Decode/tokens=exit@{inside[-1] + 2}")
            await asyncio.to_thread(point.inject)
            try:
                asking = asyncio.create_task(asked(client, content, sampling=sampling, tokens=AT * 8))
                await asyncio.to_thread(point.verify)
            finally:
                await asyncio.to_thread(point.end)
            heard = await asking
    assert heard.answer == whole.answer
    assert replaced(wide) - before == 1
    await wide.settled(seconds=45)


async def test_a_router_is_killed_and_the_client_goes_on_at_another(wide: Trio) -> None:
    """M18"""
    content = unseen()
    async with clients(wide.targets) as (client,):
        whole = await asked(client, content)
        heard = Heard()
        asking = asyncio.create_task(asked(client, content, heard=heard))
        await begun(asking, heard)
        router = await serving(wide)
        try:
            async with injected(Kill(router.pid)):
                await asyncio.to_thread(router.kill)  # reaps it
                await asking
        finally:
            await back(router)
    assert heard.answer == whole.answer and heard.resumes == 1
    await wide.settled()


@pytest.mark.chaos
async def test_a_lone_router_is_killed_and_nothing_is_drawn_for_it_and_the_client_goes_on_when_it_is_back(
    wide: Trio,
) -> None:
    """M19"""
    content, router = unseen(), wide.router
    async with clients(router.target) as (client,):
        whole = await asked(client, content)
        heard = Heard()
        asking = asyncio.create_task(asked(client, content, heard=heard))
        await begun(asking, heard)
        try:
            async with injected(Kill(router.pid)):
                await asyncio.to_thread(router.kill)  # reaps it
                running = "chiasm_num_requests_running"
                await until(lambda: not any(role.counted()[running] for role in wide.decoders))
                assert not asking.done()
        finally:
            await back(router)
        await asking
    assert heard.answer == whole.answer and heard.resumes == 1
    await wide.settled()


@pytest.mark.chaos
async def test_a_router_told_to_end_takes_nobody_new_and_its_streams_go_on_at_another(wide: Trio) -> None:
    """M20, of 20 streams."""
    contents = [unseen() for _ in range(20)]
    async with clients(wide.targets, *wide.targets) as (client, *each):
        whole = await asyncio.gather(*(asked(client, content) for content in contents))
        heard = [Heard() for _ in contents]
        asking = [
            asyncio.create_task(asked(client, content, heard=one)) for content, one in zip(contents, heard, strict=True)
        ]
        await until(lambda: all(one.ids for one in heard), seconds=60)
        router = await serving(wide)
        try:
            os.kill(router.pid, signal.SIGTERM)
            await asyncio.to_thread(router.wait_for, "draining")
            with pytest.raises((Unavailable, ConnectionFailed)):
                await asked(each[wide.routers.index(router)], unseen(), tokens=1)
            await asyncio.gather(*asking)
            await until(lambda: router.code is not None)
            assert router.code == 0
        finally:
            await back(router)
    assert [one.answer for one in heard] == [one.answer for one in whole]
    resumes = [one.resumes for one in heard]
    assert any(resumes) and max(resumes) == 1, resumes
    await wide.settled()


async def test_two_routers_that_go_on_with_one_answer_at_once_both_tell_the_rest_exactly(wide: Trio) -> None:
    """M80"""
    content = unseen()
    first, second = wide.targets
    async with clients(first, second) as (one, other):
        whole = await asked(one, content)
        heard = await asked(one, content, leave_at=AT)
        assert heard.point is not None and len(heard.ids) < TOKENS
        rests = await asyncio.gather(*(asked(client, content, resume=heard.point) for client in (one, other)))
    for rest in rests:
        assert heard.ids + rest.ids == whole.ids and heard.text + rest.text == whole.text and rest.ends == 1
    await wide.settled()
