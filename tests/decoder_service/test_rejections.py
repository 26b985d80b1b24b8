"""Entries that are not believed are counted and logged, and one that comes back wrong is told louder."""

from __future__ import annotations

import logging

import pytest

from decoder_service.rejections import OFTEN, Rejections
from tests.cache.arenas import key


def test_every_reason_is_there_from_the_start_and_counts_for_itself() -> None:
    rejections = Rejections()
    assert set(rejections.counts.values()) == {0}
    assert {"header", "size", "tag", "key", "identity", "form", "dtype", "grid", "shape"} <= set(rejections.counts)
    for reason in ("tag", "tag", "key"):
        rejections.note(key("a"), reason)
    assert +rejections.counts == {"tag": 2, "key": 1}


def test_a_key_that_comes_back_wrong_is_an_error_and_others_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections()
    for number in range(OFTEN):
        rejections.note(key("a"), "tag")
        rejections.note(key(f"another {number}"), "size")
    levels = [(record.levelno, getattr(record, "times", None)) for record in caplog.records]
    assert levels.count((logging.ERROR, OFTEN)) == 1
    assert sum(level == logging.WARNING for level, _ in levels) == 2 * OFTEN - 1
    assert all(key("a").hex() not in record.getMessage() for record in caplog.records)


def test_only_so_many_keys_are_remembered(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections(most=2)
    for _ in range(3 * OFTEN):
        for name in "abc":
            rejections.note(key(name), "tag")
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert rejections.counts["tag"] == 9 * OFTEN
