"""The ledger against a plain model of it: no two entries overlap, none that is pinned goes, only the oldest that are in
the way, nobody holds more than its share, and what nobody wants any more is not found."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from chiasm.cache.columns import ALIGNMENT
from chiasm.cache.ledger import Ledger, Totals
from chiasm.cache.pins import Pin
from chiasm.cache.records import Extent
from chiasm.cache.store import NOBODY
from chiasm.errors import Overloaded
from tests.cache.arenas import key

UNITS = 24
CAPACITY = UNITS * ALIGNMENT
SHARE = UNITS // 2 * ALIGNMENT
TTL = 200


def small(capacity: int = CAPACITY, *, owner_budget: int | None = None, ttl: int | None = None) -> Ledger:
    overhead = Ledger(memoryview(bytearray(1 << 20))).offset
    ledger = Ledger(memoryview(bytearray(overhead + capacity)), owner_budget=owner_budget, ttl=ttl)
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
    owner: int
    used: int
    written: bool = False
    pins: dict[int, int] = field(default_factory=dict)  # when each ends

    def pinned(self, now: int) -> bool:
        return any(end > now for end in self.pins.values())

    def fresh(self, now: int) -> bool:
        return now - self.used <= TTL or self.pinned(now)

    @property
    def end(self) -> int:
        return self.extent.start + self.extent.size

    def overlaps(self, start: int, end: int) -> bool:
        return self.extent.start < end and start < self.end


def owner_of(number: int) -> bytes:
    return number.to_bytes(8, "little")


class LedgerAgainstModel(RuleBasedStateMachine):
    """What the model knows: everything kept, the least recently used first. Whatever happens takes a tick."""

    names = st.sampled_from("abcdefgh")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = small(owner_budget=SHARE, ttl=TTL)
        self.time = 1
        self.kept: list[Kept] = []
        self.numbers = itertools.count(1)

    @property
    def now(self) -> int:
        self.time += 1
        return self.time

    def there(self, name: str) -> Kept | None:
        return next((kept for kept in self.kept if kept.name == name and kept.written), None)

    def readable(self, name: str) -> Kept | None:
        kept = self.there(name)
        return kept if kept is not None and kept.fresh(self.time) else None

    def used(self, kept: Kept) -> None:
        kept.used = self.time
        self.kept.remove(kept)
        self.kept.append(kept)

    def fits(self, needed: int, gone: list[Kept]) -> bool:
        """Whether a gap would be wide enough, were some not there."""
        edges = sorted((kept.extent.start, kept.end) for kept in self.kept if kept not in gone)
        left = [0, *(end for _, end in edges)]
        right = [*(start for start, _ in edges), CAPACITY]
        return any(b - a >= needed for a, b in zip(left, right, strict=True))

    def in_turn(self, name: str, needed: int, owner: int) -> tuple[list[Kept], list[Kept]] | None:
        """Who goes for the owner's share, and who may go in what order for room; None if the share is in use."""
        old = self.there(name)
        going = [kept for kept in self.kept if kept.written and not kept.pinned(self.time)]
        going.sort(key=lambda kept: kept is not old)  # what is replaced goes before the oldest
        over = sum(kept.extent.size for kept in self.kept if kept.owner == owner) + needed - SHARE
        if owner == 0 or over <= 0:
            return [], going
        forced = []
        for kept in going:
            if over > 0 and kept.owner == owner:
                forced.append(kept)
                over -= kept.extent.size
        rest = [kept for kept in going if kept not in forced]
        rest.sort(key=lambda kept: (kept is not old, kept.owner != owner))
        return None if over > 0 else (forced, rest)

    @rule(
        name=names,
        units=st.integers(1, UNITS + 1),
        writer=st.integers(0, 2),
        lease=st.integers(0, 50),
        owner=st.integers(0, 2),
    )
    def reserve(self, name: str, units: int, writer: int, lease: int, owner: int) -> None:
        now = self.now
        number = next(self.numbers)
        pin = Pin(pin_id(number), now + lease) if lease else None
        needed = units * ALIGNMENT
        before = self.ledger.evictions

        def reserve() -> Extent:
            sizes = (needed - 30, 10, 20)
            return self.ledger.reserve(key(name), *sizes, writer=writer, now=now, pin=pin, owner=owner_of(owner))

        turn = self.in_turn(name, needed, owner)
        if turn is None or not self.fits(needed, [*turn[0], *turn[1]]):
            with pytest.raises(Overloaded) as caught:
                reserve()
            assert caught.value.retryable == (needed <= (SHARE if owner else CAPACITY))
            return
        forced, going = turn
        old = self.there(name)
        extent = reserve()
        assert (extent.payload, extent.header, extent.tag, extent.size) == (needed - 30, 10, 20, needed)
        assert extent.start % ALIGNMENT == 0 and extent.start + extent.size <= CAPACITY
        in_the_way = [k for k in self.kept if k.overlaps(extent.start, extent.start + extent.size) and k not in forced]
        assert all(victim in going for victim in in_the_way), "pinned, or being written"
        if in_the_way:
            last = max(going.index(victim) for victim in in_the_way)
            assert not self.fits(needed, [*forced, *going[:last]]), "there was room without one of them"
        victims = [*forced, *in_the_way]
        assert self.ledger.evictions - before == len([victim for victim in victims if victim is not old])
        kept = Kept(extent, name, bytes([number % 256]) * needed, writer, owner, now)
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
        old = self.there(kept.name)
        self.ledger.publish(kept.extent, now=self.now)
        kept.written = True
        if old is not None:
            kept.pins.update(old.pins)
            self.kept.remove(old)
        self.used(kept)

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

    @rule(name=names, lease=st.integers(1, 50))
    def pin(self, name: str, lease: int) -> None:
        number, now = next(self.numbers), self.now
        found = self.ledger.pin(key(name), Pin(pin_id(number), now + lease), now=now)
        kept = self.readable(name)
        assert found == (None if kept is None else kept.extent)
        if kept is not None:
            kept.pins[number] = now + lease
            self.used(kept)

    @precondition(lambda self: any(kept.pins and kept.written for kept in self.kept))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from([kept for kept in self.kept if kept.pins and kept.written]))
        number = data.draw(st.sampled_from(sorted(kept.pins)))
        del kept.pins[number]
        self.ledger.unpin(key(kept.name), pin_id(number))

    @rule(name=names)
    def touch(self, name: str) -> None:
        found = self.ledger.find(key(name), now=self.now)
        kept = self.readable(name)
        assert (found is None) == (kept is None)
        if found is not None and kept is not None:
            self.ledger.touch(found, now=self.now)
            self.used(kept)

    @rule(name=names)
    def discard(self, name: str) -> None:
        self.ledger.discard(key(name))
        self.kept = [k for k in self.kept if k.name != name or not k.written]

    @rule()
    def flush(self) -> None:
        self.ledger.flush(now=self.now)
        self.kept = [k for k in self.kept if not k.written or k.pinned(self.time)]

    @rule(ticks=st.integers(1, 40) | st.just(TTL))
    def time_goes_by(self, ticks: int) -> None:
        self.time += ticks

    @invariant()
    def everything_kept_is_there_byte_for_byte_and_found(self) -> None:
        assert sorted(self.ledger.extents()) == sorted(k.extent for k in self.kept)
        for kept in self.kept:
            start, size = kept.extent.start, kept.extent.size
            assert self.ledger.data[start : start + size].tobytes() == kept.content
            expected = kept.extent if kept.written and kept.fresh(self.time) else None
            assert self.ledger.at(kept.extent.generation, key(kept.name), now=self.time) == expected
            assert self.ledger.holds(kept.extent) == kept.written
            if kept.written:
                assert self.ledger.find(key(kept.name), now=self.time) == expected

    @invariant()
    def no_owner_holds_more_than_its_share(self) -> None:
        for owner in (1, 2):
            assert sum(kept.extent.size for kept in self.kept if kept.owner == owner) <= SHARE

    @invariant()
    def it_counts_what_is_there(self) -> None:
        usage = self.ledger.usage(now=self.time)
        assert usage.entries == sum(k.written for k in self.kept)
        assert usage.bytes == sum(k.extent.size for k in self.kept)
        assert usage.pinned_bytes == sum(k.extent.size for k in self.kept if k.pinned(self.time))


def test_the_ledger_agrees_with_a_plain_model_of_it() -> None:
    run_state_machine_as_test(LedgerAgainstModel, settings=settings(max_examples=100, stateful_step_count=40))


def put(ledger: Ledger, name: str, size: int, *, now: int = 0, pin: Pin | None = None, owner: bytes = NOBODY) -> Extent:
    extent = ledger.reserve(key(name), size, 0, 0, writer=0, now=now, pin=pin, owner=owner)
    ledger.publish(extent, now=now)
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
    assert "".join(name for name in "abcdefg" if ledger.find(key(name), now=0)) == "abefg"


def test_as_many_records_as_there_are_and_then_the_oldest_goes() -> None:
    ledger = small(2048 * 64)
    for i in range(1024):
        put(ledger, f"{i}", 64, now=i)
    put(ledger, "one more", 64, now=1024)
    assert ledger.usage(now=0).entries == 1024
    assert ledger.find(key("0"), now=0) is None
    assert ledger.find(key("one more"), now=0) is not None
    assert ledger.evictions == 1


def there(ledger: Ledger, names: str, *, now: int = 0) -> str:
    return "".join(name for name in names if ledger.find(key(name), now=now))


def test_an_owner_over_its_share_gives_up_its_own_oldest_and_nobody_elses() -> None:
    ledger = small(8 * 64, owner_budget=3 * 64)
    for now, name in enumerate("abc"):
        put(ledger, name, 64, now=now, owner=owner_of(1))
    for now, name in enumerate("xyz"):
        put(ledger, name, 64, now=now - 3, owner=owner_of(2))
    put(ledger, "d", 64, now=9, owner=owner_of(1))
    assert there(ledger, "abcdxyz") == "bcdxyz", "although those of the other are older, and there was room"


def test_an_owner_whose_pinned_entries_are_in_the_way_of_its_share_is_refused_for_now_and_others_are_not() -> None:
    ledger = small(8 * 64, owner_budget=3 * 64)
    for name in "abc":
        put(ledger, name, 64, owner=owner_of(1), pin=Pin(pin_id(ord(name)), 10))
    with pytest.raises(Overloaded) as caught:
        put(ledger, "d", 64, owner=owner_of(1))
    assert (caught.value.reason, caught.value.retryable) == ("CACHE_FULL", True)
    assert caught.value.facts == {"needed": 64, "budget": 3 * 64}
    put(ledger, "e", 3 * 64, owner=owner_of(2))
    put(ledger, "f", 2 * 64)
    assert there(ledger, "abcdef") == "abcef"
    with pytest.raises(Overloaded) as never:
        put(ledger, "g", 4 * 64, owner=owner_of(3))
    assert not never.value.retryable
    put(ledger, "d", 64, owner=owner_of(1), now=10)
    assert there(ledger, "abcd", now=10) == "bcd", "the pins have ended"


def test_an_owner_whose_own_leave_no_gap_gives_up_more_of_its_own_before_anybody_elses() -> None:
    ledger = small(4 * 64, owner_budget=3 * 64)
    for now, (name, owner) in enumerate([("a", 1), ("y", 2), ("b", 1), ("c", 1)]):
        put(ledger, name, 64, now=0 if owner == 2 else now + 1, owner=owner_of(owner))
    put(ledger, "d", 2 * 64, now=9, owner=owner_of(1))
    assert there(ledger, "abcdy") == "dy", "a and b would be enough for the share, and leave no gap"


def test_what_nobody_has_used_for_its_time_is_not_found_unless_it_is_pinned() -> None:
    ledger = small(ttl=100)
    for name in "abc":
        put(ledger, name, 64, pin=Pin(pin_id(3), 500) if name == "c" else None)
    extent = ledger.find(key("b"), now=100)
    assert extent is not None
    ledger.touch(extent, now=100)
    assert there(ledger, "abc", now=101) == "bc"
    assert ledger.pin(key("a"), Pin(pin_id(1), 999), now=101) is None
    assert ledger.at(extent.generation, key("b"), now=200) == extent
    assert ledger.at(extent.generation, key("b"), now=201) is None
    assert there(ledger, "abc", now=499) == "c"
    assert there(ledger, "abc", now=500) == ""


def test_every_process_counts_into_the_same_totals() -> None:
    body = memoryview(bytearray(small().offset + CAPACITY))
    one, other = Ledger(body), Ledger(body)
    put(one, "a", CAPACITY)
    put(other, "b", CAPACITY)
    one.pin(key("b"), Pin(pin_id(1), 10), now=0)
    other.pin(key("a"), Pin(pin_id(2), 10), now=0)
    assert one.totals() == other.totals() == Totals(puts=2, evictions=1, asked=2, found=1)


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
    assert ledger.find(key("b"), now=0) is None and len(ledger.extents()) == 1
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
        new.publish(extent, now=0)
    assert ledger.usage(now=0).entries == 2
    assert ledger.find(key("a"), now=0) == extent
    third = put(ledger, "a", 64)
    assert ledger.extents() == [third]


def test_an_entry_that_is_replaced_while_it_is_looked_for_is_found() -> None:
    """The look begins before the new one is readable and comes to the old one when it is gone."""
    looks = 0

    def told(step: str) -> None:
        nonlocal looks
        looks += step == "looking"
        if looks == 2 and writer.find(key("a"), now=0) != successor:
            writer.publish(successor, now=0)

    body = memoryview(bytearray(1 << 20))
    writer, reader = Ledger(body), Ledger(body, step=told)
    put(writer, "first in the table", 64)
    put(writer, "a", 64)
    writer.discard(key("first in the table"))
    successor = writer.reserve(key("a"), 64, 0, 0, writer=0, now=0)
    assert reader.find(key("a"), now=0) == successor
    assert looks == 4, "the new one too early, the old one too late, and both once more"
