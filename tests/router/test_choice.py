"""Which worker takes a request: equal media meet, no worker is buried, timelines go where they were."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any, cast

import pytest

from chiasm.rpc.v1 import common_pb2 as pb
from router.choice import Affinity, affinity_keys, choose_decoder, choose_encoder
from router.fleet import DecoderWorker, EncoderWorker, Worker
from tests.asking import image, question


def workers(count: int) -> list[Worker[Any]]:
    return [Worker(bytes([number]) * 16, cast(Any, None)) for number in range(count)]


def hint(number: int) -> bytes:
    return number.to_bytes(4, "big")


def chosen(found: list[EncoderWorker], of: bytes) -> EncoderWorker:
    worker = choose_encoder(found, of)
    assert worker is not None
    return worker


def test_idle_encoders_are_chosen_by_the_medium_alone_and_a_lost_one_moves_only_its_own() -> None:
    found: list[EncoderWorker] = workers(5)
    before = {number: chosen(found, hint(number)) for number in range(200)}
    assert len(set(before.values())) == 5
    lost = found[2]
    left = [worker for worker in found if worker is not lost]
    for number, worker in before.items():
        assert worker is lost or chosen(left, hint(number)) is worker


def test_no_encoder_has_much_more_media_than_the_average_however_they_hash() -> None:
    found: list[EncoderWorker] = workers(4)
    hints = [number for number in map(hint, range(2000)) if chosen(found, number) is found[0]][:80]
    with ExitStack() as calls:
        for one in hints:  # all of them prefer the same one
            calls.enter_context(chosen(found, one).making(one))
        loads = [len(worker.hints) for worker in found]
        assert sum(loads) == 80 and max(loads) <= 1.25 * 20 + 2 and loads[0] == max(loads)
    assert not any(worker.hints for worker in found)


def test_equal_media_in_flight_meet_wherever_they_went_and_weigh_once() -> None:
    found: list[EncoderWorker] = workers(3)
    with ExitStack() as calls:
        for _ in range(32):
            worker = chosen(found, b"hot")
            calls.enter_context(worker.making(b"hot"))
        assert Counter(len(worker.hints) for worker in found) == {0: 2, 1: 1}
        for number in range(8):
            calls.enter_context(worker.making(hint(number)))
        assert chosen(found, b"hot") is worker
        assert all(chosen(found, hint(number)) is not worker for number in range(100, 200)), "it has too much to do"


def test_an_encoder_whose_queue_is_long_in_patches_is_spared_new_media() -> None:
    found: list[EncoderWorker] = workers(3)
    first = chosen(found, b"a")
    first.hear(pb.Load(running=2, queued_cost=100_000))
    others = [worker for worker in found if worker is not first]
    for worker in others:
        worker.hear(pb.Load(running=2, queued_cost=1000))
    assert chosen(found, b"a") in others
    first.hear(pb.Load(running=2, queued_cost=1000))
    assert chosen(found, b"a") is first


def test_a_worker_that_refused_is_not_asked_while_another_can_be() -> None:
    found = workers(2)
    first = chosen(found, b"a")
    first.refused(60.0)
    assert chosen(found, b"a") is not first
    (other,) = (worker for worker in found if worker is not first)
    assert all(choose_decoder(found) is other for _ in range(20))
    other.refused(60.0)
    assert chosen(found, b"a") is first, "if all have refused they are as good as each other"


def test_a_timeline_goes_to_the_decoder_that_had_its_media_unless_that_is_far_busier() -> None:
    found: list[DecoderWorker] = workers(4)
    affinity = Affinity()
    clip = image(b"some picture")
    keys = affinity_keys(question("What?", clip), bytes(32))
    first = choose_decoder(found, keys, affinity)
    assert first is not None
    follow_up = affinity_keys(question("And of what colour?", clip), bytes(32))
    with first.busy():
        assert all(choose_decoder(found, follow_up, affinity) is first for _ in range(20))
    with ExitStack() as calls:
        for _ in range(3):
            calls.enter_context(first.busy())
        moved = choose_decoder(found, follow_up, affinity)
        assert moved is not first and moved is not None
    assert choose_decoder(found, follow_up, affinity) is moved, "it has the units now"
    left = [worker for worker in found if worker is not moved]
    assert choose_decoder(left, follow_up, affinity) in left


def test_long_texts_that_begin_alike_meet_and_tenants_have_nothing_in_common() -> None:
    system = "You are very careful. " * 40
    one, two = (affinity_keys(question(system, ask), bytes(32)) for ask in ("a", "b"))
    assert one == two and len(one) == 1
    assert affinity_keys(question(system, "a"), b"\1" * 32) != one
    assert affinity_keys(question("short"), bytes(32)) == []
    assert affinity_keys(question(image(b"x")), bytes(32)) != affinity_keys(question(image(b"y")), bytes(32))


def test_what_is_remembered_of_timelines_is_bounded_and_the_oldest_is_forgotten() -> None:
    (worker,) = workers(1)
    affinity = Affinity(remembered=10)
    for number in range(100):
        affinity.note([hint(number)], worker)
    assert len(affinity) == 10
    assert affinity.find([hint(99)], [worker]) is worker and affinity.find([hint(89)], [worker]) is None


@pytest.mark.parametrize("count", [2, 8])
def test_without_anything_in_common_two_are_drawn_and_the_less_busy_takes_it(count: int) -> None:
    found: list[DecoderWorker] = workers(count)
    with ExitStack() as calls:
        for _ in range(200):
            worker = choose_decoder(found)
            assert worker is not None
            calls.enter_context(worker.busy())
        busy = [worker.running for worker in found]
        assert max(busy) - min(busy) <= 6
