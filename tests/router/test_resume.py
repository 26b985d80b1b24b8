"""A stream goes on where its decoder or its router was lost: each token once, in order, and of the same answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing

import pytest

from chiasm.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServerError, Unavailable, Unsupported
from chiasm.rpc.call import streamed
from chiasm.rpc.v1 import router_pb2 as rpb
from router.admission import cost_of
from router.computing import ATTEMPTS
from router.resume_token import LEEWAY, ResumeTokens
from router.servicer import RouterLimits
from router.tenants import Quota
from tests.router.drawing import LENGTH, NEXT_PRINT, ROOT, Decoder, Fault, Heard, Kind, asked, serving, truth
from tests.waiting import until


def pair(*faults: Fault) -> list[Decoder]:
    """Two decoders; whichever is called takes the next fault."""
    coming = deque(faults)
    return [Decoder(coming), Decoder(coming)]


def assert_whole(heard: Heard, request: rpb.GenerateRequest) -> None:
    """Nobody sees that it was ever broken, but for the points to go on from."""
    expected = truth(request)
    assert heard.tokens == expected
    assert heard.text == {s: b"".join(b"%x " % token for token in ids) for s, ids in enumerate(expected)}
    assert len(heard.started) == 1
    assert sorted(end.sequence for end in heard.finished) == list(range(len(expected)))
    assert [end.HasField("usage") for end in heard.finished] == [False] * (len(expected) - 1) + [True]
    assert heard.finished[-1].usage.output_tokens == sum(map(len, expected))


# -- decoders that are lost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(LENGTH + 1))
async def test_a_decoder_lost_at_any_token_is_replaced_and_no_token_is_lost_or_repeated(at: int) -> None:
    request = asked()
    decoders = pair(Fault("lost", at))
    async with serving(decoders) as (router,):
        heard = await router.ask(request)
        assert_whole(heard, request)
        opened = sorted((o for decoder in decoders for o in decoder.opened), key=lambda o: o.attempt)
        assert [o.attempt for o in opened] == [point.attempt for point in heard.points] == [1, 2]
        assert [list(emitted.ids) for emitted in opened[1].emitted] == [truth(request)[0][:at]] * (at > 0)
        assert heard.attempts == [1] * at + [2] * (LENGTH - at)
        assert opened[0].request_id == opened[1].request_id and opened[0].seed == opened[1].seed


@pytest.mark.parametrize("kind", ["broken", "gap", "short"])
async def test_a_decoder_that_breaks_off_or_skips_a_token_is_not_believed_any_further(kind: Kind) -> None:
    request = asked()
    async with serving(pair(Fault(kind, 3))) as (router,):
        heard = await router.ask(request)
        assert_whole(heard, request)
        assert heard.attempts == [1] * 3 + [2] * (LENGTH - 3)


@pytest.mark.parametrize("kind", ["repeat", "stale"])
async def test_what_was_told_before_and_what_another_attempt_says_is_dropped_and_counted(kind: Kind) -> None:
    request = asked()
    async with serving(pair(Fault(kind, 3))) as (router,):
        heard = await router.ask(request)
        assert_whole(heard, request)
        assert heard.attempts == [1] * LENGTH
        why = "repeated" if kind == "repeat" else kind
        counted = {s.labels["why"]: s.value for m in router.servicer.meter.collect() for s in m.samples
                   if s.name == "chiasm_dropped_responses_total"}  # fmt: skip
        assert counted[why] == 1


async def test_decoders_lost_one_after_the_other_each_add_their_tokens() -> None:
    request = asked()
    async with serving(pair(Fault("lost", 2), Fault("lost", 3), Fault("lost", LENGTH))) as (router,):
        heard = await router.ask(request)
        assert_whole(heard, request)
        assert heard.attempts == [1, 1, 2, 3, 3, 3] and [point.attempt for point in heard.points] == [1, 2, 3, 4]


@pytest.mark.parametrize("at", range(LENGTH + 1))
async def test_of_several_answers_those_that_had_ended_stay_ended(at: int) -> None:
    request = asked(n=3)
    async with serving(pair(Fault("lost", at))) as (router,):
        assert_whole(await router.ask(request), request)


async def test_a_decoder_that_stands_still_is_replaced_and_nobody_hears_it_when_it_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.member.ANSWER_SECONDS", 0.2)
    request = asked()
    decoders = pair(Fault("still", 2))
    async with serving(decoders) as (router,):
        heard = await router.ask(request)
        assert_whole(heard, request)
        sleeper = next(decoder for decoder in decoders if decoder.deaf)
        await until(lambda: sleeper.left == 1)
        told, sleeper.deaf = sleeper.told, False
        sleeper.wakes.set()
        await until(lambda: not sleeper.running)
        assert sleeper.told == told


async def test_what_is_seen_is_told_once() -> None:
    async with serving(pair(Fault("lost", 3))) as (router,):
        heard = await router.ask(asked())
        assert [visible.index for visible in heard.visible] == [0]


async def test_an_answer_that_ends_a_second_decoder_at_the_same_token_is_not_given_to_a_third() -> None:
    request = asked()
    decoders = pair(Fault("lost", 3), Fault("lost", 3), Fault("lost", 3))
    async with serving(decoders) as (router,):
        with pytest.raises(InvalidRequest) as caught:
            await router.ask(request)
        assert caught.value.reason == "POISON_INPUT" and not caught.value.retryable
        assert sum(len(decoder.opened) for decoder in decoders) == 2
        with pytest.raises(InvalidRequest):
            await router.ask(request)
        assert sum(len(decoder.opened) for decoder in decoders) == 2


async def test_a_request_whose_decoders_die_again_and_again_ends_and_its_token_stays_good() -> None:
    request = asked()
    faults = deque(Fault("lost", at) for at in range(1, ATTEMPTS + 2))
    decoders = [Decoder(faults, length=2 * ATTEMPTS) for _ in range(ATTEMPTS)]  # none of them often enough to rest
    async with serving(decoders) as (router,):
        heard = Heard()
        with pytest.raises(Unavailable):
            await router.ask(request, heard)
        assert heard.tokens == [truth(request, length=2 * ATTEMPTS)[0][:ATTEMPTS]]
        decoders[0].faults.clear()
        await router.ask(heard.resume(request), heard)
        assert heard.tokens == truth(request, length=2 * ATTEMPTS)
        assert heard.points[-1].attempt == ATTEMPTS + 1


async def test_a_decoder_that_is_ending_is_not_counted() -> None:
    request = asked()
    async with serving(pair(Fault("lost", 2), *[Fault("drains")] * 3)) as (router,):
        assert_whole(await router.ask(request), request)


async def test_an_answer_that_has_begun_waits_for_decoders_that_are_full() -> None:
    request = asked()
    decoders = pair(Fault("full"), Fault("lost", 2), *[Fault("full")] * 5)
    async with serving(decoders, roots=(ROOT, ROOT)) as (first, second):
        assert_whole(await first.ask(request), request)
        assert not decoders[0].faults, "both were asked again and again"
        decoders[0].faults.extend([Fault("lost", 3)])
        heard = await first.ask(request, tokens=2)
        decoders[0].faults.extend([Fault("full")] * 5)
        await second.ask(heard.resume(request), heard)
        assert heard.tokens == truth(request) and not decoders[0].faults


async def test_one_that_has_not_begun_is_refused_when_two_are_full() -> None:
    decoders = pair(*[Fault("full")] * 3)
    async with serving(decoders) as (router,):
        with pytest.raises(Overloaded) as caught:
            await router.ask(asked())
        assert caught.value.reason == "QUEUE_FULL" and len(decoders[0].faults) == 1


async def test_a_deadline_that_passes_while_an_answer_waits_for_another_decoder_says_so() -> None:
    async with serving(pair(Fault("lost", 2), *[Fault("full")] * 99)) as (router,):
        heard = Heard()
        with pytest.raises(DeadlineExceeded) as caught:
            await router.ask(asked(), heard, seconds=2.0)
        assert caught.value.stage == "queue" and heard.tokens == [truth(asked())[0][:2]]


# -- another model is no replacement -----------------------------------------------------------------------------------


async def test_only_a_decoder_of_the_same_text_fingerprint_goes_on() -> None:
    request = asked()
    coming = deque([Fault("lost", 2)])
    same, others = Decoder(coming), [Decoder(text_fingerprint=bytes([8] * 32)) for _ in range(3)]
    async with serving([same]) as (first,), serving([same, *others]) as (second,):
        heard = await first.ask(request, tokens=1)
        await second.ask(heard.resume(request), heard)
        assert heard.tokens == truth(request) and not any(other.opened for other in others)


async def test_of_two_models_under_one_name_that_one_goes_on_which_began() -> None:
    request = asked()
    old, new = Decoder(), [Decoder(fingerprint=NEXT_PRINT) for _ in range(4)]
    async with serving([old]) as (first,), serving([old, *new]) as (second,):
        heard = await first.ask(request, tokens=1)
        await second.ask(heard.resume(request), heard)
        assert heard.tokens == truth(request) and not any(other.opened for other in new)


@pytest.mark.parametrize("other", [{"fingerprint": NEXT_PRINT}, {"text_fingerprint": bytes([8] * 32)}])
async def test_an_answer_is_not_gone_on_with_by_another_model(other: dict[str, bytes]) -> None:
    request = asked()
    before, after = Decoder(), Decoder(**other)  # type: ignore[arg-type]
    async with serving([before]) as (first,), serving([after]) as (second,):
        heard = await first.ask(request, tokens=2)
        with pytest.raises(Unsupported) as caught:
            await second.ask(heard.resume(request), heard)
        assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "RESUME_MODEL_CHANGED")
        assert not after.opened


async def test_an_answer_is_not_gone_on_with_from_another_prompt() -> None:
    async with serving(pair(Fault("lost", 2), Fault("other prompt", LENGTH))) as (router,):
        with pytest.raises(Unsupported) as caught:
            await router.ask(asked())
        assert caught.value.reason == "RESUME_MODEL_CHANGED"


async def test_a_state_that_cannot_be_replayed_ends_the_request_as_aborted() -> None:
    async with serving(pair(Fault("lost", 2), Fault("not resumable"))) as (router,):
        heard = Heard()
        with pytest.raises(ServerError) as caught:
            await router.ask(asked(), heard)
        assert (caught.value.code, caught.value.reason) == ("ABORTED", "NOT_RESUMABLE")
        assert heard.tokens == [truth(asked())[0][:2]]


# -- routers that are lost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, LENGTH + 1))
async def test_another_router_of_the_same_secret_goes_on_at_the_next_token(at: int) -> None:
    request = asked()
    async with serving(pair(), roots=(ROOT, ROOT)) as (first, second):
        heard = await first.ask(request, tokens=at)
        await second.ask(heard.resume(request), heard)
        assert heard.tokens == truth(request) and len(heard.finished) == 1
        assert [point.attempt for point in heard.points] == [1, 2]


async def test_a_seed_that_was_drawn_goes_with_the_token() -> None:
    request = asked()
    request.sampling.ClearField("seed")
    decoders = pair()
    async with serving(decoders, roots=(ROOT, ROOT)) as (first, second):
        heard = await first.ask(request, tokens=2)
        await second.ask(heard.resume(request), heard)
        opened = [o for decoder in decoders for o in decoder.opened]
        assert opened[0].seed == opened[1].seed
        request.sampling.seed = opened[0].seed
        assert heard.tokens == truth(request)


async def test_two_routers_that_go_on_with_one_answer_at_once_both_tell_it_exactly() -> None:
    request = asked(n=2)
    async with serving(pair(), roots=(ROOT, ROOT)) as (first, second):
        heard = await first.ask(request, tokens=2)
        again, both = heard.resume(request), [Heard(), Heard()]
        for other in both:
            other.ids = {sequence: [*ids] for sequence, ids in heard.ids.items()}
        await asyncio.gather(first.ask(again, both[0]), second.ask(again, both[1]))
        assert [other.tokens for other in both] == [truth(request)] * 2


async def test_what_a_request_says_in_no_order_may_be_said_in_another() -> None:
    request = asked()
    request.sampling.stop_token_ids.extend([1 << 25, 1 << 26])
    request.sampling.banned_token_ids.extend([1 << 27, 1 << 28])
    for token in (7, 3):
        request.sampling.logit_bias.add(token_id=token, bias=token)
    async with serving(pair()) as (router,):
        heard = await router.ask(request, tokens=2)
        again = heard.resume(request)
        for field in ("stop_token_ids", "banned_token_ids", "logit_bias"):
            said = getattr(again.sampling, field)
            said.sort(key=lambda one: getattr(one, "token_id", one))
            said.reverse()
        again.sampling.banned_token_ids.append(1 << 27)
        await router.ask(again, heard)
        assert heard.tokens == truth(request)


async def test_a_token_is_used_within_its_tenants_quota() -> None:
    request = asked()
    limits = RouterLimits(quota=Quota(cost_per_minute=5 * cost_of(request) // 2))
    async with serving(pair(), limits=limits) as (router,):
        heard = await router.ask(request, tokens=2)
        await router.ask(heard.resume(request), Heard(ids={0: [*heard.ids[0]]}))
        with pytest.raises(Overloaded) as caught:
            await router.ask(heard.resume(request))
        assert caught.value.reason == "TENANT_QUOTA"


def _forged(request: rpb.GenerateRequest) -> None:
    token = bytearray(request.resume.resume_token)
    token[1] ^= 1  # the number of its attempt
    request.resume.resume_token = bytes(token)


def _cut(request: rpb.GenerateRequest) -> None:
    request.resume.resume_token = request.resume.resume_token[:-1]


def _nothing(request: rpb.GenerateRequest) -> None:
    request.resume.resume_token = b"?"


def _long(request: rpb.GenerateRequest) -> None:
    request.resume.resume_token = bytes(100_000)


def _foreign(request: rpb.GenerateRequest) -> None:
    tokens = ResumeTokens(ROOT)
    request.resume.resume_token = ResumeTokens(bytes(32)).make(tokens.read(request.resume.resume_token))


def _other_prompt(request: rpb.GenerateRequest) -> None:
    request.prompt.plain.parts[0].text = "Say something else."


def _other_sampling(request: rpb.GenerateRequest) -> None:
    request.sampling.temperature = 0.5


def _other_seed(request: rpb.GenerateRequest) -> None:
    request.sampling.seed += 1


@pytest.mark.parametrize(
    "change", [_forged, _cut, _nothing, _long, _foreign, _other_prompt, _other_sampling, _other_seed]
)
async def test_a_token_that_does_not_fit_is_refused_without_a_word_why(
    change: Callable[[rpb.GenerateRequest], None],
) -> None:
    request, decoders = asked(), pair()
    async with serving(decoders) as (router,):
        heard = await router.ask(request, tokens=2)
        again = heard.resume(request)
        change(again)
        with pytest.raises(InvalidRequest) as caught:
            await router.ask(again, heard)
        assert caught.value.message == "the resume token does not fit this request"
        assert (caught.value.reason, caught.value.item) == ("RESUME_TOKEN_INVALID", "resume")
        assert sum(len(decoder.opened) for decoder in decoders) == 1, "no worker has heard of it"


@pytest.mark.parametrize("late", [LEEWAY - 1, LEEWAY + 1])
async def test_a_token_is_taken_until_it_ends_and_as_long_as_clocks_may_differ(late: float) -> None:
    request = asked()
    async with serving(pair()) as (router,):
        heard = await router.ask(request, tokens=2)
        again, tokens = heard.resume(request), ResumeTokens(ROOT)
        said = tokens.read(again.resume.resume_token)
        again.resume.resume_token = tokens.make(said._replace(until=time.time() - late))
        if late < LEEWAY:
            await router.ask(again, heard)
            assert heard.tokens == truth(request)
        else:
            with pytest.raises(InvalidRequest) as caught:
                await router.ask(again, heard)
            assert caught.value.reason == "RESUME_TOKEN_INVALID" and "expired" in caught.value.message


# -- the end of a router, and clients that do not read -----------------------------------------------------------------


async def test_a_router_that_ends_tells_its_streams_and_they_go_on_elsewhere() -> None:
    request = asked()
    decoders = [Decoder(pause=0.05)]
    async with serving(decoders, roots=(ROOT, ROOT)) as (first, second):
        heard = Heard()
        asking = asyncio.create_task(first.ask(request, heard))
        await until(lambda: len(heard.ids.get(0, [])) >= 2)
        await first.servicer.let_go()
        with pytest.raises(Unavailable) as caught:
            await asking
        assert caught.value.reason == "DRAINING" and caught.value.retryable
        await second.ask(heard.resume(request), heard)
        assert heard.tokens == truth(request)


async def test_a_client_that_does_not_read_is_let_go_and_its_decoder_with_it() -> None:
    decoder = Decoder(text=b"x" * 10_000, length=2_500)
    async with serving([decoder], limits=RouterLimits(slow_seconds=0.3)) as (router,):
        heard = Heard()
        async with aclosing(streamed(router.stub.Generate(asked(), timeout=60))) as events:
            while not heard.ids:
                heard.note(await anext(events))
            await until(lambda: decoder.left == 1)
            assert decoder.told < 2_500, "it was not let draw on"
            await until(lambda: router.servicer.meter.running == 0)
            with pytest.raises(ServerError) as caught:
                async for event in events:
                    heard.note(event)
        assert (caught.value.code, caught.value.reason) == ("ABORTED", "SLOW_CONSUMER")
        expected = truth(asked(), length=2_500)
        assert heard.tokens == [expected[0][: len(heard.ids[0])]]
        decoder.text = b""
        await router.ask(heard.resume(asked()), heard)
        assert heard.tokens == expected
