"""How busy a worker is rides on its messages, now and then."""

from __future__ import annotations

from chiasm.rpc.load import Riding, load_of
from chiasm.rpc.turns import Turns
from chiasm.rpc.v1 import decoder_pb2 as dpb


async def test_the_first_and_the_last_message_carry_it_and_one_a_second_between() -> None:
    now, asked = 100.0, 0
    turns = Turns(max_waiting=8)

    def load() -> object:
        nonlocal asked
        asked += 1
        return load_of(turns, 0.5)

    riding = Riding(load, clock=lambda: now)  # type: ignore[arg-type]
    with turns.enter() as running, turns.enter() as waiting:
        running.weigh(30)
        waiting.weigh(12)
        await running.begin()
        told = []
        for at in (0.0, 0.1, 0.9, 1.1, 1.2, 1.3):
            now = 100.0 + at
            response = dpb.DecodeResponse()
            riding.on(response, last=at == 1.3)
            told.append(response.HasField("load"))
        assert told == [True, False, False, True, False, True] and asked == 3, "nothing is counted for a plain token"
        assert (response.load.running, response.load.waiting, response.load.queued_cost) == (1, 1, 42)
