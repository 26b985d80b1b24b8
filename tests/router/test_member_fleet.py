"""A fleet over a membership: workers are found, paired by fingerprint and reach, chosen from, lost and found again."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from chiasm.errors import ConnectionFailed, DeadlineExceeded, Unavailable
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.circuit import BROKEN, FIRST_REST
from router.fleet import EncoderCalls, EncoderWorker, Form, Served, common_form
from router.member import Member, Members, addresses
from router.member_fleet import MemberFleet
from router.ray_fleet import Controlled
from router.ray_words import Told
from router.remote import RemoteEncoder
from router.static_fleet import StaticFleet
from tests.router.child import plan, program
from tests.waiting import until

PRINT = bytes(range(32))
ARENA = bytes(16)


class Encoder(encoder_pb2_grpc.EncoderServicer):
    """Says who it is."""

    def __init__(
        self,
        fingerprint: bytes = PRINT,
        arena: bytes = ARENA,
        model: str = "m",
        shared: bytes | None = None,
        forms: Sequence[Form] = (pb.ENTRY_FORM_CROSS_KV,),
    ) -> None:
        self.replica = pb.Replica(replica_id=secrets.token_bytes(16), arena_id=arena, shared_store_id=shared)
        self.models = [epb.EncoderModel(name=model, fingerprint=fingerprint, forms=forms)]
        self.draining = False
        self.missing: list[str] = []
        self.stalled = False

    async def Info(self, request: epb.EncoderInfoRequest, context: Any) -> epb.EncoderInfoResponse:
        return epb.EncoderInfoResponse(
            replica=self.replica,
            models=self.models,
            draining=self.draining,
            missing=self.missing,
            stalled=self.stalled,
        )


class Decoder(decoder_pb2_grpc.DecoderServicer):
    """Says who it is, and how busy."""

    def __init__(
        self,
        fingerprint: bytes = PRINT,
        arena: bytes = ARENA,
        model: str = "m",
        running: int = 0,
        shared: bytes | None = None,
        forms: Sequence[Form] = (pb.ENTRY_FORM_CROSS_KV,),
    ) -> None:
        self.replica = pb.Replica(replica_id=secrets.token_bytes(16), arena_id=arena, shared_store_id=shared)
        model_of = dpb.DecoderModel(name=model, fingerprint=fingerprint, family="f", context_limit=7, layers=3)
        model_of.forms.extend(forms)
        self.models = [model_of]
        self.load = pb.Load(running=running)

    async def Info(self, request: dpb.DecoderInfoRequest, context: Any) -> dpb.DecoderInfoResponse:
        return dpb.DecoderInfoResponse(replica=self.replica, models=self.models, load=self.load)


@asynccontextmanager
async def serving(worker: Encoder | Decoder, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = Server(address)
    if isinstance(worker, Encoder):
        server.add("chiasm.rpc.v1.Encoder", encoder_pb2_grpc.add_EncoderServicer_to_server, worker)
    else:
        server.add("chiasm.rpc.v1.Decoder", decoder_pb2_grpc.add_DecoderServicer_to_server, worker)
    async with server:
        yield server.target


class FleetOf(Protocol):
    """A fleet of addresses, as one membership or another says them."""

    def __call__(
        self, encoders: Sequence[str], decoders: Sequence[str], *, patience: float = 5.0
    ) -> AbstractAsyncContextManager[MemberFleet]: ...


@asynccontextmanager
async def fleet_of_names(
    encoders: Sequence[str], decoders: Sequence[str], *, patience: float = 5.0
) -> AsyncIterator[MemberFleet]:
    fleet = StaticFleet(encoders, decoders, patience=patience, beat=0.05)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


@pytest.fixture(params=["names", "controller"])
def fleet_of(request: pytest.FixtureRequest, tmp_path: Path) -> FleetOf:
    """By fixed names, and as the controller of a fleet over Ray says them."""
    if request.param == "names":
        return fleet_of_names

    @asynccontextmanager
    async def fleet_of_controller(
        encoders: Sequence[str], decoders: Sequence[str], *, patience: float = 5.0
    ) -> AsyncIterator[MemberFleet]:
        folder = tmp_path / secrets.token_hex(4)
        folder.mkdir()
        said = Told({"encoder": list(encoders), "decoder": list(decoders)}).line()
        controlled = Controlled(plan(folder), command=program("say(sys.argv[1]); hear(os.devnull)", said))
        fleet = MemberFleet(controlled, patience=patience, beat=0.05)
        await controlled.start()
        await fleet.start()
        try:
            yield fleet
        finally:
            await fleet.close()
            await controlled.close()

    return fleet_of_controller


async def known(fleet: MemberFleet, name: str = "m") -> Served:
    await until(lambda: name in fleet.models() and fleet.models()[name].ready)
    return fleet.models()[name]


async def test_a_model_is_served_by_a_pair_and_described_by_its_decoder(fleet_of: FleetOf) -> None:
    encoder, decoder = Encoder(), Decoder()
    async with serving(encoder) as e, serving(decoder) as d, fleet_of([e], [d]) as fleet:
        model = await known(fleet)
        assert model == Served("m", PRINT, "f", 7, 3, ready=True, embeds=False, conditions=False), "no mode was named"
        chosen = await fleet.decoder(model)
        assert chosen.replica_id == decoder.replica.replica_id
        assert (await fleet.encoder(model, chosen, hint=b"")).replica_id == encoder.replica.replica_id
        await chosen.calls.reach()


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": bytes(32)},
        {"arena": bytes([1] * 16)},
        {"model": "other"},
        {"forms": (pb.ENTRY_FORM_STATES, pb.ENTRY_FORM_CROSS_KV_INT8)},
    ],
    ids=["fingerprint", "arena", "model", "forms"],
)
async def test_workers_that_do_not_fit_are_no_pair(fleet_of: FleetOf, other: dict[str, Any]) -> None:
    async with serving(Encoder(**other)) as e, serving(Decoder()) as d, fleet_of([e], [d], patience=0.3) as fleet:
        await until(lambda: len([*fleet.workers()]) == 2)
        assert "m" not in fleet.models()
        with pytest.raises(Unavailable) as caught:
            await fleet.decoder(Served("m", PRINT, "f", 7, 3))
        assert caught.value.reason == "NO_READY_ENCODER" and caught.value.retryable


async def test_of_a_model_that_was_replaced_who_was_told_nothing_hears_so_at_once_and_others_wait(
    fleet_of: FleetOf,
) -> None:
    new = bytes(reversed(PRINT))
    async with (
        serving(Encoder(fingerprint=new)) as e,
        serving(Decoder(fingerprint=new)) as d,
        fleet_of([e], [d], patience=0.3) as fleet,
    ):
        chosen = await fleet.decoder(await known(fleet))
        old = Served("m", PRINT, "f", 7, 3)
        for ask in (fleet.decoder(old), fleet.encoder(old, chosen, hint=b"")):
            with pytest.raises(Unavailable) as caught:
                await ask
            assert caught.value.reason == "MODEL_REPLACED" and caught.value.retryable
        with pytest.raises(Unavailable) as caught:
            await fleet.decoder(replace(old, text_fingerprint=bytes(32)))
        assert caught.value.reason == "NO_READY_DECODER"


async def test_workers_without_a_common_form_are_told_of_once(
    fleet_of: FleetOf, caplog: pytest.LogCaptureFixture
) -> None:
    encoder, decoder = Encoder(forms=(pb.ENTRY_FORM_STATES,)), Decoder(forms=(pb.ENTRY_FORM_CROSS_KV,))
    with caplog.at_level("WARNING", logger="router.member_fleet"):
        async with serving(encoder) as e, serving(decoder) as d, fleet_of([e], [d]) as fleet:
            await until(lambda: len([*fleet.workers()]) == 2)
            for _ in range(3):
                assert not fleet.models()
    (record,) = [record for record in caplog.records if record.message == "no common form"]
    assert vars(record)["encoder"] == ("ENTRY_FORM_STATES",) and vars(record)["decoder"] == ("ENTRY_FORM_CROSS_KV",)


async def test_the_form_of_a_pair_is_the_first_of_the_decoders_that_the_encoder_makes(fleet_of: FleetOf) -> None:
    """A decoder never gets a form it did not tell, and of several encoders only one that makes one of its forms."""
    kv, states, int8 = pb.ENTRY_FORM_CROSS_KV, pb.ENTRY_FORM_STATES, pb.ENTRY_FORM_CROSS_KV_INT8
    async with AsyncExitStack() as stack:
        made = [(kv, states), (int8, kv), (int8,)]
        e = [await stack.enter_async_context(serving(Encoder(forms=forms))) for forms in made]
        decoder = Decoder(forms=(states, kv))
        d = await stack.enter_async_context(serving(decoder))
        fleet = await stack.enter_async_context(fleet_of(e, [d]))
        model = await known(fleet)
        await until(lambda: len([*fleet.workers()]) == 4)
        chosen = await fleet.decoder(model)
        agreed = set()
        for i in range(40):
            worker = await fleet.encoder(model, chosen, hint=bytes([i]))
            agreed.add((tuple(worker.forms["m"]), common_form(worker, chosen, "m")))
        assert agreed == {((kv, states), states), ((int8, kv), kv)}


async def test_entries_stay_within_reach_of_their_decoder(fleet_of: FleetOf) -> None:
    """Two nodes, each with an arena of its own."""
    near, far = bytes([1] * 16), bytes([2] * 16)
    async with AsyncExitStack() as stack:
        e = [await stack.enter_async_context(serving(Encoder(arena=arena))) for arena in (near, far)]
        d = [await stack.enter_async_context(serving(Decoder(arena=arena))) for arena in (near, far)]
        fleet = await stack.enter_async_context(fleet_of(e, d))
        model = await known(fleet)
        await until(lambda: len([*fleet.workers()]) == 4)
        for i in range(20):
            decoder = await fleet.decoder(model)
            assert (await fleet.encoder(model, decoder, hint=bytes([i]))).reach == decoder.reach


async def test_nodes_that_share_a_store_reach_each_other_and_the_own_node_is_preferred(fleet_of: FleetOf) -> None:
    near, far, shared = bytes([1] * 16), bytes([2] * 16), bytes([9] * 16)
    async with AsyncExitStack() as stack:

        async def encoder(arena: bytes, shared: bytes | None) -> str:
            return await stack.enter_async_context(serving(Encoder(arena=arena, shared=shared)))

        d = await stack.enter_async_context(serving(Decoder(arena=near, shared=shared)))
        there = await encoder(far, shared)
        stranger = await encoder(far, bytes([8] * 16))
        alone = await encoder(far, None)
        fleet = await stack.enter_async_context(fleet_of([there, stranger, alone], [d]))
        model = await known(fleet)
        await until(lambda: len([*fleet.workers()]) == 4)
        decoder = await fleet.decoder(model)
        assert fleet.count_encoders(model, decoder) == 1
        chosen = await fleet.encoder(model, decoder, hint=b"")
        assert chosen.reach.arena == far and chosen.reach.shared == shared

        here = await encoder(near, shared)
        both = await stack.enter_async_context(fleet_of([there, here], [d]))
        await until(lambda: len([*both.workers()]) == 3)
        decoder = await both.decoder(await known(both))
        for i in range(20):
            assert (await both.encoder(model, decoder, hint=bytes([i]))).reach.arena == near


async def test_ranks_go_around_the_encoders_in_the_order_that_a_hint_prefers(fleet_of: FleetOf) -> None:
    async with AsyncExitStack() as stack:
        e = [await stack.enter_async_context(serving(Encoder())) for _ in range(3)]
        d = await stack.enter_async_context(serving(Decoder()))
        fleet = await stack.enter_async_context(fleet_of(e, [d]))
        model = await known(fleet)
        await until(lambda: len([*fleet.workers()]) == 4)
        decoder = await fleet.decoder(model)
        assert fleet.count_encoders(model, decoder) == 3
        ranked = [(await fleet.encoder(model, decoder, hint=b"a", rank=rank)).replica_id for rank in range(4)]
        assert len(set(ranked[:3])) == 3 and ranked[3] == ranked[0]


async def test_equal_media_meet_at_one_encoder_and_others_spread(fleet_of: FleetOf) -> None:
    async with AsyncExitStack() as stack:
        e = [await stack.enter_async_context(serving(Encoder())) for _ in range(3)]
        d = await stack.enter_async_context(serving(Decoder()))
        fleet = await stack.enter_async_context(fleet_of(e, [d]))
        model = await known(fleet)
        await until(lambda: len([*fleet.workers()]) == 4)
        decoder = await fleet.decoder(model)

        async def chosen(hint: bytes) -> bytes:
            return (await fleet.encoder(model, decoder, hint=hint)).replica_id

        hints = [bytes([i]) for i in range(60)]
        first = [await chosen(hint) for hint in hints]
        assert [await chosen(hint) for hint in hints] == first and len(set(first)) == 3


async def test_of_two_decoders_the_less_busy_is_chosen(fleet_of: FleetOf) -> None:
    busy, idle = Decoder(running=5), Decoder()
    async with serving(Encoder()) as e, serving(busy) as b, serving(idle) as i, fleet_of([e], [b, i]) as fleet:
        model = await known(fleet)
        await until(lambda: len([*fleet.workers()]) == 3)
        chosen = await fleet.decoder(model)
        assert chosen.replica_id == idle.replica.replica_id
        with ExitStack() as calls:
            for _ in range(6):
                calls.enter_context(chosen.busy())
            assert (await fleet.decoder(model)).replica_id == busy.replica.replica_id
        assert (await fleet.decoder(model)) is chosen


async def test_a_fresh_fleet_waits_for_its_first_answer_and_then_says_to_come_back(
    fleet_of: FleetOf, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/e"
    async with serving(Decoder()) as d, fleet_of([address], [d]) as fleet:
        asking = asyncio.create_task(fleet.known())
        async with serving(Encoder(), address):
            assert (await asking)["m"].ready
    async with fleet_of([address], [address], patience=0.1) as fleet:
        with pytest.raises(Unavailable) as caught:
            await fleet.known()
        assert caught.value.reason == "NOT_READY" and caught.value.retryable


async def test_a_decoder_without_an_encoder_is_not_the_one_that_is_missing(fleet_of: FleetOf) -> None:
    encoder = Encoder()
    async with serving(encoder) as e, serving(Decoder()) as d, fleet_of([e], [d], patience=0.1) as fleet:
        model = await known(fleet)
        encoder.draining = True
        await until(lambda: not fleet.models()["m"].ready)
        with pytest.raises(Unavailable) as caught:
            await fleet.decoder(model)
        assert caught.value.reason == "NO_READY_ENCODER"


async def test_a_worker_that_drains_gets_nothing_new(fleet_of: FleetOf) -> None:
    encoder = Encoder()
    async with serving(encoder) as e, serving(Decoder()) as d, fleet_of([e], [d], patience=0.1) as fleet:
        model = await known(fleet)
        decoder = await fleet.decoder(model)
        encoder.draining = True
        await until(lambda: not fleet.models()["m"].ready)
        with pytest.raises(Unavailable) as caught:
            await fleet.encoder(model, decoder, hint=b"")
        assert caught.value.reason == "NO_READY_ENCODER"


async def test_a_worker_that_is_back_is_another_one_and_whoever_waits_gets_it(
    fleet_of: FleetOf, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/e"
    async with serving(Decoder()) as d, fleet_of([address], [d]) as fleet:
        async with serving(Encoder(), address):
            model = await known(fleet)
            decoder = await fleet.decoder(model)
            before = await fleet.encoder(model, decoder, hint=b"")
        fleet.lost(before)
        assert not fleet.models()["m"].ready, "a worker that was lost is not chosen before it has answered"
        with pytest.raises(ConnectionFailed):
            while True:  # a connection that has just broken takes a moment to be known as such
                await before.calls.reach()
                await asyncio.sleep(0.01)
        waiting = asyncio.create_task(fleet.encoder(model, decoder, hint=b""))
        async with serving(Encoder(), address):
            after = await waiting
            assert after is not before and after.replica_id != before.replica_id
            await after.calls.reach()


async def test_a_call_that_broke_at_a_worker_that_lives_costs_it_one_question(fleet_of: FleetOf) -> None:
    async with serving(Encoder()) as e, serving(Decoder()) as d, fleet_of([e], [d]) as fleet:
        model = await known(fleet)
        decoder = await fleet.decoder(model)
        encoder = await fleet.encoder(model, decoder, hint=b"")
        fleet.lost(encoder)
        assert (await fleet.encoder(model, decoder, hint=b"")).replica_id == encoder.replica_id


async def test_a_name_that_drops_a_worker_leaves_its_calls_alone() -> None:
    """A pod that ends is taken out of its name first, and drains then."""
    there = [True]

    async with serving(Encoder()) as e:

        def member(target: str) -> Member[EncoderCalls, epb.EncoderInfoResponse]:
            remote = RemoteEncoder(target)
            return Member(remote, remote.info, remote.close, lambda: None, beat=0.05)

        async def find(name: str) -> list[str]:
            return [e] if there[0] else []

        members = Members(["dns:///encoders:1"], member)
        await members.look_up(find)
        await until(lambda: len([*members.up()]) == 1)
        ((worker, _),) = members.up()
        there[0] = False
        with worker.busy():
            await members.look_up(find)
            assert not [*members.up()], "it gets nothing new"
            await worker.calls.reach()
            there[0] = True
            await members.look_up(find)
            await until(lambda: len([*members.up()]) == 1)
            assert [known for known, _ in members.up()] == [worker], "it is back, and the same"
            there[0] = False
            await members.look_up(find)
            await worker.calls.reach()
        await members.look_up(find)
        with pytest.raises(ConnectionFailed):
            await worker.calls.reach()


async def test_a_worker_that_stands_still_is_told_apart_from_one_that_is_gone() -> None:
    encoder = Encoder()
    async with serving(encoder) as e:
        remote, asked = RemoteEncoder(e), asyncio.Event()
        calls: EncoderCalls = remote

        async def ask(*, timeout: float) -> epb.EncoderInfoResponse:  # noqa: ASYNC109
            if asked.is_set():
                raise DeadlineExceeded("the deadline of the call passed")
            return await remote.info(timeout=timeout)

        member = Member(calls, ask, remote.close, lambda: None, beat=0.05)

        async def there() -> EncoderWorker:
            await until(lambda: member.up is not None)
            assert member.up is not None
            return member.up[0]

        worker = await there()
        asked.set()
        await asyncio.wait_for(worker.silent.wait(), 5)
        asked.clear()
        with worker.busy():
            back = await there()
            running = not member.idle
        assert running and member.idle, "what was given up may still run"
        assert back is not worker and not back.silent.is_set(), "what was given up stays given up"
        await member.close()


async def test_a_worker_that_does_not_answer_is_asked_again_soon_and_then_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([False, False, False, True, False, False, True])
    waits: list[float] = []
    asked = asyncio.Event()
    limit = asyncio.timeout

    async def ask(*, timeout: float) -> epb.EncoderInfoResponse:  # noqa: ASYNC109
        there = next(answers, None)
        if there is None:
            asked.set()
            await asyncio.Event().wait()
        if not there:
            raise ConnectionFailed("nobody listens")
        return epb.EncoderInfoResponse()

    def at_once(wait: float) -> asyncio.Timeout:
        waits.append(wait)
        return limit(0)

    async with serving(Encoder()) as e:
        remote = RemoteEncoder(e)
        calls: EncoderCalls = remote
        monkeypatch.setattr("router.member.asyncio.timeout", at_once)
        member = Member(calls, ask, remote.close, lambda: None, beat=0.3)
        await asked.wait()
        monkeypatch.undo()
        await member.close()
    assert waits == [0.1, 0.2, 0.3, 0.3, 0.1, 0.2, 0.3]


async def test_a_name_stands_for_every_address_it_has() -> None:
    async with serving(Encoder()) as e, serving(Decoder()) as d:
        names = [f"dns:///localhost:{target.rpartition(':')[2]}" for target in (e, d)]
        assert e in await addresses(names[0])
        async with fleet_of_names([names[0]], [names[1]]) as fleet:
            await known(fleet)


async def test_a_name_that_nobody_knows_stands_for_none_and_breaks_nothing() -> None:
    for name in ("no.such.name.invalid", "a..b", "x" * 64):
        assert await addresses(f"dns:///{name}:1") == []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        async with fleet_of_names([nobody, "dns:///no.such.name.invalid:1"], [nobody], patience=0.2) as fleet:
            await asyncio.sleep(0.2)
            assert fleet.models() == {}


async def test_a_worker_that_lacks_something_is_not_chosen_and_goes_on_with_what_it_has() -> None:
    encoder = Encoder()
    async with serving(encoder) as e, serving(Decoder()) as d, fleet_of_names([e], [d]) as fleet:
        model = await known(fleet)
        worker = await fleet.encoder(model, await fleet.decoder(model), hint=b"")
        encoder.missing = ["the region"]
        await until(lambda: not fleet.models()["m"].ready)
        assert not worker.silent.is_set()
        encoder.missing = []
        await until(lambda: fleet.models()["m"].ready)
        assert await fleet.encoder(model, await fleet.decoder(model), hint=b"") is worker


async def test_a_worker_that_answers_and_whose_device_stands_still_is_given_up_with_what_it_has() -> None:
    encoder = Encoder()
    async with serving(encoder) as e, serving(Decoder()) as d, fleet_of_names([e], [d]) as fleet:
        model = await known(fleet)
        worker = await fleet.encoder(model, await fleet.decoder(model), hint=b"")
        encoder.stalled = True
        await asyncio.wait_for(worker.silent.wait(), 10)
        assert not fleet.models()["m"].ready


async def test_an_answer_may_take_a_beat_and_never_less_than_a_busy_machine_needs() -> None:
    given: list[float] = []

    async def ask(*, timeout: float) -> epb.EncoderInfoResponse:  # noqa: ASYNC109
        given.append(timeout)
        return epb.EncoderInfoResponse()

    async def end() -> None:
        pass

    async def asked(beat: float) -> None:
        given.clear()
        calls: EncoderCalls = RemoteEncoder("127.0.0.1:1")
        member = Member(calls, ask, end, lambda: None, beat=beat)
        await until(lambda: bool(given))
        await member.close()

    await asked(3.0)
    assert given[0] == 3.0
    await asked(0.01)
    assert given[0] == 2.0


async def test_a_worker_that_says_who_it_is_and_breaks_every_call_rests_and_is_then_given_one() -> None:
    async with serving(Encoder()) as e, serving(Decoder()) as d, fleet_of_names([e], [d]) as fleet:
        model = await known(fleet)
        decoder = await fleet.decoder(model)
        worker = await fleet.encoder(model, decoder, hint=b"")
        for _ in range(BROKEN):
            await until(lambda: fleet.models()["m"].ready)
            fleet.lost(worker)
        assert worker.circuit.open
        given = await fleet.encoder(model, decoder, hint=b"")  # waits
        assert given is worker and not worker.circuit.resting
        with suppress(ConnectionFailed), worker.busy():
            assert not fleet.models()["m"].ready, "one at a time"
            raise ConnectionFailed("it broke again")
        fleet.lost(worker)
        assert worker.circuit.resting > FIRST_REST
        worker.circuit.passed()
        await until(lambda: fleet.models()["m"].ready)
