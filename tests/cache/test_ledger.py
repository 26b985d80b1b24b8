"""The ledger against a plain model of it: no two entries overlap, none that is pinned goes, and only the oldest that
are in the way."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from chiasm.cache.columns import ALIGNMENT
from chiasm.cache.ledger import Extent, Ledger
from chiasm.cache.pins import Pin
from chiasm.errors import Overloaded
from tests.cache.arenas import key

UNITS = 24
CAPACITY = UNITS * ALIGNMENT


def small(capacity: int = CAPACITY) -> Ledger:
    overhead = Ledger(memoryview(bytearray(1 << 20))).offset
    ledger = Ledger(memoryview(bytearray(overhead + capacity)))
    assert ledger.capacity == capacity
    return ledger


def pin_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


@dataclass(eq=False)
class Kept:
    extent: Extent
    name: str
    content: bytes
    writer: int
    written: bool = False
    pins: dict[int, int] = field(default_factory=dict)  # when each ends

    def pinned(self, now: int) -> bool:
        return any(end > now for end in self.pins.values())

    def overlaps(self, start: int, end: int) -> bool:
        return self.extent.start < end and start < self.extent.start + self.extent.size


class LedgerAgainstModel(RuleBasedStateMachine):
    """What the model knows: everything kept, the least recently used first."""

    names = st.sampled_from("abcdefgh")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = small()
        self.now = 1
        self.kept: list[Kept] = []
        self.numbers = itertools.count(1)

    def readable(self, name: str) -> Kept | None:
        return next((kept for kept in self.kept if kept.name == name and kept.written), None)

    def fits(self, needed: int, gone: list[Kept]) -> bool:
        """Whether a gap would be wide enough, were some not there."""
        edges = sorted((k.extent.start, k.extent.start + k.extent.size) for k in self.kept if k not in gone)
        left = [0, *(end for _, end in edges)]
        right = [*(start for start, _ in edges), CAPACITY]
        return any(b - a >= needed for a, b in zip(left, right, strict=True))

    @rule(name=names, units=st.integers(1, UNITS + 1), writer=st.integers(0, 2), lease=st.integers(0, 5))
    def reserve(self, name: str, units: int, writer: int, lease: int) -> None:
        old = self.readable(name)
        going = [k for k in self.kept if k.written and not k.pinned(self.now)]
        going.sort(key=lambda kept: kept is not old)  # what is replaced goes before the oldest
        number = next(self.numbers)
        pin = Pin(pin_id(number), self.now + lease) if lease else None
        needed = units * ALIGNMENT
        before = self.ledger.evictions
        if not self.fits(needed, going):
            with pytest.raises(Overloaded) as caught:
                self.ledger.reserve(key(name), needed - 30, 10, 20, writer=writer, now=self.now, pin=pin)
            assert caught.value.retryable == (needed <= CAPACITY)
            return
        extent = self.ledger.reserve(key(name), needed - 30, 10, 20, writer=writer, now=self.now, pin=pin)
        assert (extent.payload, extent.header, extent.tag, extent.size) == (needed - 30, 10, 20, needed)
        assert extent.start % ALIGNMENT == 0 and extent.start + extent.size <= CAPACITY
        victims = [k for k in self.kept if k.overlaps(extent.start, extent.start + extent.size)]
        assert all(victim in going for victim in victims), "pinned, or being written"
        if victims:
            last = max(going.index(victim) for victim in victims)
            assert not self.fits(needed, going[:last]), "there was room without one of them"
        assert self.ledger.evictions - before == len([victim for victim in victims if victim is not old])
        kept = Kept(extent, name, bytes([number % 256]) * needed, writer)
        if pin is not None:
            kept.pins[number] = pin.end
        self.ledger.data[extent.start : extent.start + needed] = number % 256
        self.kept = [*(k for k in self.kept if k not in victims), kept]

    def writing(self) -> list[Kept]:
        return [kept for kept in self.kept if not kept.written]

    @precondition(lambda self: self.writing())
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.writing()))
        old = self.readable(kept.name)
        self.ledger.publish(kept.extent)
        kept.written = True
        if old is not None:
            kept.pins.update(old.pins)
            self.kept.remove(old)
        self.kept.remove(kept)
        self.kept.append(kept)

    @precondition(lambda self: self.writing())
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(self.writing()))
        self.ledger.abandon(kept.extent)
        self.ledger.abandon(kept.extent)
        self.kept.remove(kept)

    @rule(writer=st.integers(0, 2))
    def a_writer_dies(self, writer: int) -> None:
        self.ledger.reclaim(lambda slot: slot != writer)
        self.kept = [k for k in self.kept if k.written or k.writer != writer]

    @rule(name=names, lease=st.integers(1, 5))
    def pin(self, name: str, lease: int) -> None:
        number = next(self.numbers)
        found = self.ledger.pin(key(name), Pin(pin_id(number), self.now + lease), now=self.now)
        kept = self.readable(name)
        assert found == (None if kept is None else kept.extent)
        if kept is not None:
            kept.pins[number] = self.now + lease
            self.kept.remove(kept)
            self.kept.append(kept)

    @precondition(lambda self: any(kept.pins and kept.written for kept in self.kept))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from([kept for kept in self.kept if kept.pins and kept.written]))
        number = data.draw(st.sampled_from(sorted(kept.pins)))
        del kept.pins[number]
        self.ledger.unpin(key(kept.name), pin_id(number))

    @rule(name=names)
    def touch(self, name: str) -> None:
        found = self.ledger.find(key(name))
        kept = self.readable(name)
        assert (found is None) == (kept is None)
        if found is not None and kept is not None:
            self.ledger.touch(found)
            self.kept.remove(kept)
            self.kept.append(kept)

    @rule(name=names)
    def discard(self, name: str) -> None:
        self.ledger.discard(key(name))
        self.kept = [k for k in self.kept if k.name != name or not k.written]

    @rule()
    def flush(self) -> None:
        self.ledger.flush(now=self.now)
        self.kept = [k for k in self.kept if not k.written or k.pinned(self.now)]

    @rule(ticks=st.integers(1, 4))
    def time_goes_by(self, ticks: int) -> None:
        self.now += ticks

    @invariant()
    def everything_kept_is_there_byte_for_byte_and_found(self) -> None:
        assert sorted(self.ledger.extents()) == sorted(k.extent for k in self.kept)
        for kept in self.kept:
            start, size = kept.extent.start, kept.extent.size
            assert self.ledger.data[start : start + size].tobytes() == kept.content
            found = self.ledger.at(kept.extent.generation, key(kept.name))
            assert found == (kept.extent if kept.written else None)
            assert self.ledger.holds(kept.extent) == kept.written
            if kept.written:
                assert self.ledger.find(key(kept.name)) == kept.extent

    @invariant()
    def it_counts_what_is_there(self) -> None:
        usage = self.ledger.usage(now=self.now)
        assert usage.entries == sum(k.written for k in self.kept)
        assert usage.bytes == sum(k.extent.size for k in self.kept)
        assert usage.pinned_bytes == sum(k.extent.size for k in self.kept if k.pinned(self.now))


def test_the_ledger_agrees_with_a_plain_model_of_it() -> None:
    run_state_machine_as_test(LedgerAgainstModel, settings=settings(max_examples=60, stateful_step_count=40))


def put(ledger: Ledger, name: str, size: int, *, now: int = 0, pin: Pin | None = None) -> Extent:
    extent = ledger.reserve(key(name), size, 0, 0, writer=0, now=now, pin=pin)
    ledger.publish(extent)
    return extent


def test_a_generation_is_never_given_twice_and_grows() -> None:
    ledger = small()
    seen = [put(ledger, "a", 64 * (1 + i % 9)).generation for i in range(300)]
    assert seen == sorted(set(seen))


def test_room_between_pinned_entries_is_not_enough_even_if_the_sum_is() -> None:
    """Nothing is ever moved: two pinned entries with a gap on either side leave no room for both gaps' bytes."""
    ledger = small(6 * 64)
    for name in "abcdef":
        put(ledger, name, 64, pin=Pin(pin_id(ord(name)), 10) if name in "be" else None)
    with pytest.raises(Overloaded) as caught:
        put(ledger, "g", 3 * 64)
    assert caught.value.retryable
    assert ledger.usage(now=0).entries == 6, "and nobody was evicted in vain"
    put(ledger, "g", 2 * 64)
    assert "".join(name for name in "abcdefg" if ledger.find(key(name))) == "abefg"


def test_as_many_records_as_there_are_and_then_the_oldest_goes() -> None:
    ledger = small(2048 * 64)
    for i in range(1024):
        put(ledger, f"{i}", 64)
    put(ledger, "one more", 64)
    assert ledger.usage(now=0).entries == 1024
    assert ledger.find(key("0")) is None
    assert ledger.find(key("one more")) is not None
    assert ledger.evictions == 1


def test_no_room_for_another_pin_is_refused_until_one_ends() -> None:
    ledger = small()
    put(ledger, "a", 64)
    for i in range(1024):
        assert ledger.pin(key("a"), Pin(pin_id(i), 10), now=0) is not None
    with pytest.raises(Overloaded) as pinning:
        ledger.pin(key("a"), Pin(pin_id(5000), 10), now=0)
    with pytest.raises(Overloaded) as putting:
        put(ledger, "b", 64, pin=Pin(pin_id(5001), 10))
    assert pinning.value.reason == putting.value.reason == "CACHE_FULL"
    assert pinning.value.retryable and putting.value.retryable
    assert ledger.find(key("b")) is None and len(ledger.extents()) == 1
    ledger.unpin(key("a"), pin_id(17))
    assert ledger.pin(key("a"), Pin(pin_id(5000), 10), now=0) is not None
    assert ledger.pin(key("a"), Pin(pin_id(6000), 20), now=10) is not None, "all others have ended"


def test_of_two_under_one_key_the_newer_counts_and_both_go_together() -> None:
    """As a writer leaves them that dies between publishing an entry and freeing the one it replaces."""

    class Killed(Exception):
        pass

    def dies(step: str) -> None:
        if step == "replacing":
            raise Killed

    body = memoryview(bytearray(1 << 20))
    ledger = Ledger(body)
    put(ledger, "a", 64)
    new = Ledger(body, step=dies)
    extent = new.reserve(key("a"), 128, 0, 0, writer=0, now=0)
    with pytest.raises(Killed):
        new.publish(extent)
    assert ledger.usage(now=0).entries == 2
    assert ledger.find(key("a")) == extent
    third = put(ledger, "a", 64)
    assert ledger.extents() == [third]


def test_an_entry_that_is_replaced_while_it_is_looked_for_is_found() -> None:
    """The look begins before the new one is readable and comes to the old one when it is gone."""
    looks = 0

    def told(step: str) -> None:
        nonlocal looks
        looks += step == "looking"
        if looks == 2 and writer.find(key("a")) != successor:
            writer.publish(successor)

    body = memoryview(bytearray(1 << 20))
    writer, reader = Ledger(body), Ledger(body, step=told)
    put(writer, "first in the table", 64)
    put(writer, "a", 64)
    writer.discard(key("first in the table"))
    successor = writer.reserve(key("a"), 64, 0, 0, writer=0, now=0)
    assert reader.find(key("a")) == successor
    assert looks == 4, "the new one too early, the old one too late, and both once more"
