"""Several routers behind one client: which is asked, and what becomes of media that lie in the memory of another."""

from __future__ import annotations

import asyncio
import copy
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from chiasm.client import AsyncClient, Client, Handle, Image, Video
from chiasm.client.connection import check_targets
from chiasm.client.convert import INLINE_BYTES
from chiasm.errors import ConnectionFailed, InvalidRequest, NotFound, Unavailable
from tests.client.resumable import END, TEXT, ResumableRouter, killed_when_held
from tests.client.router import serving
from tests.client.test_remote import hole, nobody

SECONDS = 30

# -- media -------------------------------------------------------------------------------------------------------------

LARGE = b"\x89PNG" + bytes(INLINE_BYTES)


async def test_media_are_sent_again_to_a_router_that_does_not_have_them() -> None:
    dying, other = ResumableRouter(3), ResumableRouter()
    dying.needs_media = other.needs_media = True
    async with (
        killed_when_held(dying) as first,
        serving(other) as second,
        AsyncClient([first.target, second.target]) as client,
    ):
        done = await client.generate("fake", ["Read.", Image(b"\x89PNG small"), Image(LARGE)])
    assert (done.text, done.resumes) == (TEXT, 1)
    (before,), (after,) = dying.requests, other.requests
    assert before.media[0] == after.media[0]
    assert "" != before.media[1].handle != after.media[1].handle != ""
    for router in (dying, other):
        (sent,) = router.uploads
        assert b"".join(request.chunk.data for request in sent[1:]) == LARGE


async def test_a_router_that_has_them_still_is_not_sent_them_again() -> None:
    router = ResumableRouter((END, 3), None)
    router.needs_media = True
    async with serving(router) as server, AsyncClient(server.target) as client:
        done = await client.generate("fake", ["Read.", Image(LARGE)])
    assert (done.text, done.resumes, len(router.uploads)) == (TEXT, 1, 1)


@pytest.mark.parametrize("several", [False, True])
async def test_a_medium_of_a_handle_is_sent_again_where_it_is_not_known(several: bool, tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"moving pictures")
    address = f"unix:{tmp_path}/router.sock"
    dying, other = ResumableRouter(3), ResumableRouter()
    dying.needs_media = other.needs_media = True
    place = f"unix:{tmp_path}/other.sock" if several else address
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient([address, place]))
        async with killed_when_held(dying, address):
            handle = await client.upload(Video(clip))
            asking = asyncio.create_task(client.generate("fake", ["Read.", Video(handle, max_frames=2)]))
            await asyncio.wait_for(dying.left.wait(), SECONDS)
        await stack.enter_async_context(serving(other, address=place))
        done = await asyncio.wait_for(asking, SECONDS)
        assert (done.text, done.resumes) == (TEXT, 1)
        assert other.requests[-1].media[0].sampling.max_frames == 2
        assert [request.chunk.data for request in other.uploads[0][1:]] == [b"moving pictures"]
        if several:
            assert (await client.generate("fake", ["Read.", handle])).text == TEXT


async def test_a_handle_that_was_made_again_has_nothing_to_send() -> None:
    dying, other = ResumableRouter(3), ResumableRouter()
    other.needs_media = True
    async with (
        killed_when_held(dying) as first,
        serving(other) as second,
        AsyncClient([first.target, second.target]) as client,
    ):
        handle = await client.upload(Image(b"\x89PNG"))
        for same in (copy.copy(handle), copy.deepcopy(handle)):
            assert same == handle and same.medium is None
        with pytest.raises(Unavailable) as caught:
            await client.generate("fake", ["Read.", Handle(handle.id, "image")])
    assert isinstance(caught.value.__cause__, NotFound)


# -- several routers ---------------------------------------------------------------------------------------------------


def test_targets_are_several_with_commas_or_in_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_targets("a:1, b:2,a:1") == check_targets(["a:1", "b:2"]) == ("a:1", "b:2")
    assert check_targets("ipv4:10.0.0.1:1,10.0.0.2:1") == ("ipv4:10.0.0.1:1,10.0.0.2:1",)
    monkeypatch.setenv("CHIASM_TARGET", "a:1,unix:/run/b.sock")
    assert check_targets(None) == ("a:1", "unix:/run/b.sock")
    for wrong in ("a:1,", ["a:1", "http://b"], []):
        with pytest.raises(InvalidRequest, match="HOST:PORT"):
            Client(wrong)
    with pytest.raises(TypeError):
        Client(7)  # type: ignore[arg-type]


async def test_every_call_goes_to_a_router_that_can_be_reached(tmp_path: Path) -> None:
    with hole() as silent:
        async with serving(ResumableRouter()) as server:
            async with AsyncClient([nobody(), silent, server.target], connect_timeout=0.3) as client:
                await client.wait_ready(20)
            for call in ("generate", "embed", "estimate", "list_models", "upload"):
                async with AsyncClient([nobody(), silent, server.target], connect_timeout=0.3) as client:
                    arguments = {"list_models": (), "upload": (Image(b"\x89PNG"),)}.get(call, ("fake", "Read."))
                    assert await getattr(client, call)(*arguments)


async def test_a_router_that_ends_hands_its_clients_to_the_next() -> None:
    ending = ResumableRouter(*[Unavailable("DRAINING", "the server is ending")] * 9)
    other = ResumableRouter()
    async with (
        serving(ending) as first,
        serving(other) as second,
        AsyncClient([first.target, second.target], max_retries=0) as client,
    ):
        assert (await client.generate("fake", "Read.")).resumes == 0
    assert (len(ending.requests), len(other.requests)) == (1, 1)


async def test_when_no_router_can_be_reached_the_last_one_is_told() -> None:
    targets = [nobody(), nobody()]
    async with AsyncClient(targets, max_retries=0) as client:
        for call in (client.generate("fake", "Read."), client.list_models(), client.wait_ready(0.3)):
            with pytest.raises(ConnectionFailed, match="no server answers"):
                await call
