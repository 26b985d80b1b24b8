"""`python -m tests.faults.streaming_client TARGET TOKENS`: a client as a process, for networks of its own.

Asks one long question and writes a line of JSON for each thing that happens: `started`, `token` with the ids, `ended`.
"""

from __future__ import annotations

import asyncio
import json
import sys

from chiasm import AsyncClient, Finished, SamplingParams, Started, Token, Video
from chiasm.client import Content
from tests import digits


def tell(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(target: str, tokens: int) -> None:
    content: Content = [Video(digits.shipped_clips()[0].path), "Read the digits."]
    sampling = SamplingParams(ignore_eos=True)
    async with AsyncClient(target, max_retries=0) as client:
        tell(event="asking")
        async with client.stream("digits", content, max_tokens=tokens, sampling=sampling) as stream:
            async for event in stream:
                if isinstance(event, Started):
                    tell(event="started")
                elif isinstance(event, Token):
                    tell(event="token", ids=list(event.ids))
                elif isinstance(event, Finished):
                    tell(event="ended")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
