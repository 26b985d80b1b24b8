"""A router whose answers can be taken up at any token, and that can be told to stand still, to stumble or to refuse.

`python -m tests.client.resumable ADDRESS INDEX` is one in a process of its own, which stands still at a token.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from unittest.mock import patch

from blake3 import blake3

from chiasm.client.progress import Progress
from chiasm.errors import ChiasmError, InvalidRequest, NotFound
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.client import fake
from tests.client.router import ScriptedRouter, serving

TEXT = "7 3 9 1"

SEEN = {0: 1, 3: 3}
"""How many of three frames are seen from a token on."""

HELD = "held"
GAP = "gap"
REPEAT = "repeat"
END = "end"

Plan: TypeAlias = "int | ChiasmError | str | tuple[str, int] | None"


class ResumableRouter(ScriptedRouter):
    """Answers TEXT, a token for each character, from where a request goes on.

    Each call of `Generate` takes the next plan, None when all are taken: an index at which it stands still, an error
    that refuses it, `(GAP, i)` to leave token i out, `(REPEAT, i)` to say from token 0 on again at i, `(END, i)` to end
    without a word at i, and None to answer.

    Attributes:
        held: set when a call stands still.
        resumed: ids that came with each request that goes on.
        needs_media: refuse handles that were not uploaded here.
    """

    def __init__(self, *plans: Plan) -> None:
        super().__init__()
        self.plans = list(plans)
        self.held = asyncio.Event()
        self.resumed: list[list[int]] = []
        self.needs_media = False

    async def Generate(self, request: rpb.GenerateRequest, context: Any) -> AsyncIterator[rpb.GenerateResponse]:
        self.requests.append(request)
        self.headers.append(dict(context.invocation_metadata()))
        self.remaining.append(context.time_remaining())
        self.came.set()
        plan = self.plans.pop(0) if self.plans else None
        try:
            if isinstance(plan, ChiasmError):
                raise plan
            for medium in request.media:
                if self.needs_media and medium.handle:
                    await self._find(medium.handle)
            async for response in self._answer(request, plan):
                self.sent += 1
                yield response
        finally:
            self.left.set()

    async def _find(self, handle: str) -> None:
        try:
            await asyncio.wait_for(self.whole[handle].wait(), 0.5)
        except TimeoutError:
            raise NotFound("MEDIA_EXPIRED", "no medium is kept under this handle") from None

    async def _answer(self, request: rpb.GenerateRequest, plan: Plan) -> AsyncIterator[rpb.GenerateResponse]:
        attempt, next_index = 1, 0
        if request.HasField("resume"):
            (emitted,) = request.resume.emitted or [pb.EmittedSequence()]
            self.resumed.append(list(emitted.ids))
            told, _, digest = request.resume.resume_token.partition(b":")
            if digest != asked(request) or list(emitted.ids) != [100 + i for i in range(len(emitted.ids))]:
                raise InvalidRequest("RESUME_TOKEN_INVALID", "the resume token does not fit this request")
            attempt, next_index = int(told) + 1, len(emitted.ids)
        yield fake.started(attempt=attempt)
        yield point(attempt, request)
        begun = next_index
        for index in range(next_index, len(TEXT) + 1):
            what, at = plan if isinstance(plan, tuple) else (HELD, plan)
            if index == at:
                if what == END:
                    return
                if what == GAP:
                    continue
                if what == REPEAT:
                    for known in range(index):
                        yield token(known, attempt)
                if what == HELD:
                    self.held.set()
                    await asyncio.Event().wait()
            if index == begun or index in SEEN:
                yield visible(index, attempt)
            if index < len(TEXT):
                yield token(index, attempt)
        yield end(attempt)


def asked(request: rpb.GenerateRequest) -> bytes:
    """What must be equal in a request that goes on: all but the resume and where media come from."""
    rest = rpb.GenerateRequest()
    rest.CopyFrom(request)
    rest.ClearField("resume")
    for medium in rest.media:
        if medium.handle:
            medium.ClearField("handle")
    return blake3(rest.SerializeToString(deterministic=True)).digest()


def point(attempt: int, request: rpb.GenerateRequest) -> rpb.GenerateResponse:
    said = rpb.ResumePoint(attempt=attempt, resume_token=b"%d:%s" % (attempt, asked(request)))
    said.expire_time.FromSeconds(1_900_000_000)
    return rpb.GenerateResponse(resume_point=said)


def token(index: int, attempt: int) -> rpb.GenerateResponse:
    response = fake.tokens(index, TEXT[index], attempt=attempt)
    drawn = pb.TokenLogprob(token_id=100 + index, logprob=-float(index))
    response.tokens.logprobs.append(pb.TokenLogprobs(drawn=drawn))
    return response


def visible(index: int, attempt: int) -> rpb.GenerateResponse:
    response = fake.visible(SEEN[max(at for at in SEEN if at <= index)], index=index)
    response.visible.attempt = attempt
    return response


def end(attempt: int) -> rpb.GenerateResponse:
    response = fake.finished()
    response.finished.attempt, response.finished.tokens = attempt, len(TEXT)
    return response


@asynccontextmanager
async def killed_when_held(router: ResumableRouter, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    """A router that is gone, without a word to anybody, as soon as a call stands still and its client has heard of it:
    where the stream breaks is left to chance, that it had begun is not."""
    loop, heard, take = asyncio.get_running_loop(), asyncio.Event(), Progress.take

    def hears(progress: Progress, response: rpb.GenerateResponse) -> bool:
        if router.came.is_set():
            loop.call_soon_threadsafe(heard.set)
        return take(progress, response)

    async with serving(router, address=address) as server:

        async def kill() -> None:
            await router.held.wait()
            await heard.wait()
            await server.stop(0)

        killing = asyncio.create_task(kill())
        try:
            with patch.object(Progress, "take", hears):
                yield server
        finally:
            killing.cancel()


async def main(address: str, index: int) -> None:
    async with serving(ResumableRouter(index), address=address):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
