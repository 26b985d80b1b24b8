"""Failpoints: what can be said, when a fault happens, and what a process without any has in its way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chiasm.errors import ConnectionFailed, Unavailable
from chiasm.failpoints import POINTS, Dropped, Failpoints, Fault, Injected, nowhere, parse
from chiasm.rpc import faulty
from chiasm.rpc.call import answered, streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from chiasm.settings import RoleSettings, SettingsError, load


def test_faults_are_read() -> None:
    assert parse(" a.b=exit ; C/d=drop@3;e.f=sleep(0.5)@2+; g.h=raise;") == {
        "a.b": Fault("exit"),
        "C/d": Fault("drop", at=3),
        "e.f": Fault("sleep", seconds=0.5, at=2, on=True),
        "g.h": Fault("raise"),
    }
    assert parse("") == {}


@pytest.mark.parametrize(
    "wrong", ["a.b", "a.b=", "a.b=explode", "a.b=exit@0", "a.b=sleep", "a.b=drop", "a.b=exit; a.b=raise", "a b=exit"]
)
def test_what_is_no_fault_is_refused_before_a_process_starts(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"is not POINT=ACTION|has two faults|no response"):
        parse(wrong)
    with pytest.raises(SettingsError):
        load(RoleSettings, ["--failpoints", wrong], program="role")


def test_a_point_that_is_nowhere_is_refused_with_the_nearest() -> None:
    faulty.check([*POINTS, *faulty.points()])
    with pytest.raises(SettingsError) as caught:
        faulty.check(["Decode/token"])
    assert caught.value.fix == "did you mean Decode/tokens?"


def test_a_fault_happens_at_its_time_and_from_then_on_if_it_says_so() -> None:
    points = Failpoints(parse("a.b=raise@2; c.d=raise@2+"))
    for point, raised in (("a.b", [False, True, False]), ("c.d", [False, True, True])):
        for expected in raised:
            if expected:
                with pytest.raises(Injected):
                    points.hit(point)
            else:
                points.hit(point)
    assert points.hits == {"a.b": 3, "c.d": 3}
    points.hit("e.f")
    assert "e.f" not in points.hits


def test_threads_that_reach_a_point_at_once_meet_its_fault_once() -> None:
    points = Failpoints(parse("a.b=raise@50"))
    raised = []

    def reach() -> None:
        for _ in range(25):
            try:
                points.hit("a.b")
            except Injected:
                raised.append(1)

    threads = [threading.Thread(target=reach) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 1 and points.hits["a.b"] == 200


def test_where_nothing_was_asked_for_nothing_is_called() -> None:
    assert not Failpoints()
    points = Failpoints(parse("store.chunks-put=raise"))
    assert points and points.within("encoder") is nowhere
    with pytest.raises(Injected):
        points.within("store")("chunks put")


async def test_a_point_of_the_wire_lets_others_go_on() -> None:
    points = Failpoints(parse("A/b=sleep(30); A/c=drop"))
    standing = asyncio.create_task(points.reached("A/b"))
    await asyncio.sleep(0)
    with pytest.raises(Dropped):
        await points.reached("A/c")
    standing.cancel()


class _Router(router_pb2_grpc.RouterServicer):
    def __init__(self) -> None:
        self.closed = 0

    async def ListModels(self, request: rpb.ListModelsRequest, context: Any) -> rpb.ListModelsResponse:
        return rpb.ListModelsResponse(models=[rpb.Model(name="there")])

    async def Generate(self, request: rpb.GenerateRequest, context: Any) -> AsyncIterator[rpb.GenerateResponse]:
        try:
            yield rpb.GenerateResponse(started=pb.Started())
            for index in range(3):
                yield rpb.GenerateResponse(tokens=pb.Tokens(ids=[index]))
        finally:
            self.closed += 1


async def test_a_response_is_dropped_as_a_lost_connection_drops_it_and_its_handler_is_left() -> None:
    servicer = _Router()
    points = Failpoints(parse("Generate/tokens=drop@2; ListModels/response=drop"))
    server = Server(interceptors=[faulty.Interceptor(points)])
    server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, servicer)
    async with server, connect(server.target) as channel:
        stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
        heard = []
        with pytest.raises(Unavailable) as caught:
            async for event in streamed(stub.Generate(rpb.GenerateRequest(), timeout=30)):
                heard.append(event.WhichOneof("event"))
        assert (heard, caught.value.reason) == (["started", "tokens"], "CONNECTION_LOST")
        assert servicer.closed == 1
        with pytest.raises(ConnectionFailed):
            await answered(stub.ListModels(rpb.ListModelsRequest(), timeout=30))
        assert (await answered(stub.ListModels(rpb.ListModelsRequest(), timeout=30))).models[0].name == "there"
