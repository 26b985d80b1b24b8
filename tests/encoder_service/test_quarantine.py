"""What killed the media processes twice is refused at once for a while, to its sender and to nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from chiasm.errors import InvalidRequest
from chiasm.rpc.medium import medium_digest
from chiasm.rpc.v1 import common_pb2 as pb
from encoder_service.quarantine import Quarantine
from tests import digits
from tests.asking import ask, question, running, video
from tests.media import make


def picture(data: bytes) -> bytes:
    """The digest of an image."""
    return medium_digest(pb.MediaHeader(kind=pb.MEDIA_KIND_IMAGE), [data])


TENANT, OTHER = bytes(32), bytes([1]) * 32


def test_it_remembers_for_its_time_and_only_for_the_tenant() -> None:
    now = [0.0]
    quarantine = Quarantine(seconds=10, clock=lambda: now[0])
    poison = picture(b"poison")
    quarantine.check(TENANT, poison)
    quarantine.remember(TENANT, poison)
    with pytest.raises(InvalidRequest) as caught:
        quarantine.check(TENANT, poison)
    assert (caught.value.reason, caught.value.facts) == ("POISON_INPUT", {"seconds": 10})
    quarantine.check(OTHER, poison)
    quarantine.check(TENANT, picture(b"poison2"))
    now[0] = 10.0
    quarantine.check(TENANT, poison)


def test_it_forgets_the_oldest_when_it_is_full() -> None:
    quarantine = Quarantine(most=2)
    media = [picture(bytes([i])) for i in range(3)]
    for medium in media:
        quarantine.remember(TENANT, medium)
    quarantine.check(TENANT, media[0])
    for medium in media[1:]:
        with pytest.raises(InvalidRequest):
            quarantine.check(TENANT, medium)


async def test_b17_a_medium_whose_processes_were_killed_twice_is_not_opened_a_third_time() -> None:
    clip = digits.shipped_clips()[0].path.read_bytes()
    large = make.video([make.flat(720, 1280, (number, 0, 0)) for number in range(12)])
    bad = question("Read the digits.", video(large))
    async with running() as service:

        async def kill_whatever_opens_it() -> None:
            while True:
                for pid in service.sandbox.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSEGV)
                await asyncio.sleep(0.005)

        killer = asyncio.create_task(kill_whatever_opens_it())
        with pytest.raises(InvalidRequest) as caught:
            await ask(service, bad)
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        assert (caught.value.reason, caught.value.item) == ("POISON_INPUT", "messages[0].content[1]")
        assert service.sandbox.pids == frozenset()
        with pytest.raises(InvalidRequest) as again:
            await ask(service, bad)
        assert again.value.reason == "POISON_INPUT"
        assert service.sandbox.pids == frozenset(), "nothing was started for it"
        assert (await ask(service, question("Read the digits.", video(clip)))).finished is not None
