"""The book of a writer: what it wrote for an owner counts as long as it may be there."""

from __future__ import annotations

from chiasm.cache.account import Account


def test_an_owner_is_held_to_its_budget_and_no_other_is() -> None:
    account = Account(64.0, 100, lambda: 0.0)
    assert account.take(b"a", 60)
    assert not account.take(b"a", 41)
    assert account.take(b"a", 40)
    assert account.take(b"b", 100)
    assert (account.bytes, account.entries) == (200, 3)


def test_what_was_written_counts_no_more_when_it_is_gone() -> None:
    now = [0.0]
    account = Account(64.0, 100, lambda: now[0])
    assert account.take(b"a", 60)
    now[0] = 30.0
    assert account.take(b"a", 40)
    now[0] = 64.5
    assert not account.take(b"a", 1), "it counts for all of its time"
    now[0] = 66.0
    assert account.take(b"a", 60)
    assert not account.take(b"a", 1)
    now[0] = 200.0
    assert (account.bytes, account.entries) == (0, 0)


def test_without_a_budget_everything_is_entered() -> None:
    account = Account(1.0, None, lambda: 0.0)
    assert all(account.take(b"a", 1 << 40) for _ in range(10))
    assert account.bytes == 10 << 40


def test_what_is_not_there_after_all_is_struck_out() -> None:
    now = [0.0]
    account = Account(64.0, 100, lambda: now[0])
    assert account.take(b"a", 60)
    now[0] = 2.0
    assert account.take(b"a", 40)
    account.give_back(b"a", 40)
    assert (account.bytes, account.entries) == (60, 1)
    assert account.take(b"a", 40)
    now[0] = 65.5
    assert (account.bytes, account.entries) == (40, 1)
    account.give_back(b"b", 40)
    assert (account.bytes, account.entries) == (40, 1)
