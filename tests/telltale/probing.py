"""What no client of the SDK asks: several answers at once, and to go on with what is another's. Over gRPC as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from chiasm.client.convert import to_generate
from chiasm.client.types import prompt_of
from chiasm.errors import ChiasmError
from chiasm.rpc.call import streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from tests.telltale.asking import Medium, Picture, Request
from tests.telltale.laboratory import Laboratory
from tests.telltale.model import NAME
from tests.telltale.oracle import Oracle
from tests.telltale.validator import Finding

_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_SECONDS = 20.0


def probe_request(name: str, *, seed: int = 3, picture: int = 900, word: str = "digit") -> Request:
    """About two pictures, of which the first is named. Its answer is long enough to be broken off."""
    media = (Medium("frames", (Picture(picture), Picture(901))),)
    return Request(name, "one", media, (0, f"which {word}"), seed=seed, temperature=1.3, max_tokens=40)


async def probe_words(lab: Laboratory, oracle: Oracle) -> list[Finding]:
    """The word to go on with is taken at another router of its tenant, for its request, and nowhere else."""
    root = lab.roots["one"]
    asked_for = (probe_request("word", seed=seed) for seed in range(100))
    request, truth = next((one, truth) for one in asked_for if len((truth := oracle.truth(one, root)).ids) > 5)
    word, ids = b"", list[int]()
    async with aclosing(_asked(lab, "one", 0, _wired(request))) as events:
        async for event in events:
            word = event.resume_point.resume_token or word
            ids += event.tokens.ids
            if len(ids) > 2:
                break
    found: list[Finding] = []
    for what, tenant, asked, said in (
        ("another tenant's", "two", request, word),
        ("of another prompt", "one", probe_request("word", seed=request.seed, word="frame"), word),
        ("of other media", "one", probe_request("word", seed=request.seed, picture=902), word),
        ("of another seed", "one", probe_request("word", seed=request.seed + 1), word),
        ("altered", "one", request, bytes([*word[:60], word[60] ^ 1, *word[61:]])),
    ):
        try:
            got = await _goes_on(lab, tenant, asked, said, ids)
        except ChiasmError as error:
            if error.reason != "RESUME_TOKEN_INVALID":
                found.append(Finding("word", "resume", f"a word {what} ends with {error!r}"))
        else:
            found.append(Finding("word", "resume", f"a word {what} was taken, and {got} came"))
    try:
        whole = [*ids, *await _goes_on(lab, "one", request, word, ids)]
    except ChiasmError as error:
        return [*found, Finding("word", "resume", f"its own word ends with {error!r}")]
    if whole != [*truth.ids]:
        found.append(Finding("word", "token", f"{whole} instead of {[*truth.ids]}"))
    return found


async def _goes_on(lab: Laboratory, tenant: str, request: Request, word: bytes, ids: list[int]) -> list[int]:
    wired = _wired(request)
    wired.resume.resume_token = word
    wired.resume.emitted.add(sequence=0, ids=ids)
    return [token async for event in _asked(lab, tenant, 1, wired) for token in event.tokens.ids]


async def probe_several(
    lab: Laboratory,
    oracle: Oracle,
    request: Request,
    *,
    n: int,
    meanwhile: Callable[[], Awaitable[None]],
    after: int,
) -> list[Finding]:
    """Asks for several answers, and holds each against the oracle.

    Args:
        meanwhile: what is done when `after` tokens came.
    """
    wired = _wired(request)
    wired.sampling.n = n
    ids: defaultdict[int, list[int]] = defaultdict(list)
    text: defaultdict[int, bytes] = defaultdict(bytes)
    ends: defaultdict[int, list[pb.Finished]] = defaultdict(list)
    found: list[Finding] = []
    started = 0

    def wrong(what: str, said: str) -> None:
        found.append(Finding(request.name, what, said))

    async for event in _asked(lab, request.tenant, 0, wired):
        started += event.HasField("started")
        if event.HasField("tokens"):
            told = event.tokens
            if told.index != len(ids[told.sequence]):
                wrong("index", f"{told.index} of sequence {told.sequence} where {len(ids[told.sequence])} was next")
            before = sum(map(len, ids.values()))
            ids[told.sequence] += told.ids
            text[told.sequence] += told.text
            if before < after <= before + len(told.ids):
                await meanwhile()
        if event.HasField("finished"):
            ends[event.finished.sequence].append(event.finished)
            text[event.finished.sequence] += event.finished.text
    truths = [oracle.truth(request, lab.roots[request.tenant], sequence=number) for number in range(n)]
    for number, truth in enumerate(truths):
        if ids[number] != [*truth.ids]:
            wrong("token", f"{ids[number]} instead of {[*truth.ids]} in sequence {number}")
        if text[number].decode() != truth.text:
            wrong("text", f"{text[number]!r} instead of {truth.text!r} in sequence {number}")
        told_ends = [(_REASONS.get(end.reason), end.stop or None) for end in ends[number]]
        if told_ends != [(truth.reason, truth.stop)]:
            wrong("reason", f"{told_ends} instead of {truth.reason} {truth.stop!r} in sequence {number}")
    used = [end.usage.output_tokens for told in ends.values() for end in told if end.HasField("usage")]
    if started != 1 or used != [sum(len(truth.ids) for truth in truths)]:
        wrong("usage", f"started {started} times, and used {used}")
    return found


def _wired(request: Request) -> rpb.GenerateRequest:
    prompt = prompt_of(request.content, None, None, None)
    return to_generate(NAME, prompt, request_id=request.name, sampling=request.sampling).request


async def _asked(
    lab: Laboratory, tenant: str, number: int, request: rpb.GenerateRequest
) -> AsyncGenerator[rpb.GenerateResponse, None]:
    async with connect(lab.fronts[tenant][number].target) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        async with aclosing(streamed(stub.Generate(request, timeout=_SECONDS))) as events:
            async for event in events:
                yield event
