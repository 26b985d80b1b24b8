"""A slice of the tell-tale laboratory: it finds nothing where nothing is wrong, and what is planted where something is.
All of it runs under `make chaos`."""

from __future__ import annotations

import copy
import io
import itertools
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from chiasm.media.sandbox import Sandbox
from tests.telltale import history as kept
from tests.telltale.altered import ALTERATIONS, sound
from tests.telltale.asking import Asking
from tests.telltale.driving import Driver
from tests.telltale.history import Fault, History, Writer
from tests.telltale.laboratory import laboratory
from tests.telltale.oracle import Oracle
from tests.telltale.plants import PLANTS
from tests.telltale.probing import probe_request, probe_several
from tests.telltale.trial import told, trial
from tests.telltale.validator import judge, judge_one

SLICE = (
    "truncated-key",
    "digest-not-compared",
    "page-of-another-prompt",
    "visible-one-less",
    "seed-index-ignored",
    "token-told-again",
    "begun-again",
    "numbers-from-the-beginning",
    "token-of-a-zombie",
    "word-of-other-media",
    "started-told-twice",
)
"""Of each kind of bug some, that are found quickly."""


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(workers=1) as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("quiet", [True, False], ids=["roomy", "tight"])
async def test_nothing_is_found_where_nothing_is_wrong(sandbox: Sandbox, oracle: Oracle, quiet: bool) -> None:
    outcome = await trial(None, sandbox, oracle, seed=11, most=30, quiet=quiet)
    assert not outcome.found, outcome.found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SLICE)
async def test_a_bug_that_is_reached_is_found(sandbox: Sandbox, oracle: Oracle, name: str) -> None:
    outcome = await trial(PLANTS[name], sandbox, oracle, seed=1, most=240)
    assert outcome.hits and outcome.found, told(PLANTS[name], outcome)


@pytest.mark.asyncio(loop_scope="module")
async def test_several_answers_to_one_prompt_go_on_when_their_decoder_is_lost(sandbox: Sandbox, oracle: Oracle) -> None:
    with tempfile.TemporaryDirectory(prefix="telltale-", dir="/dev/shm") as folder:
        async with laboratory(Path(folder), sandbox, pace=0.02) as lab:
            for seed in range(3):
                request = replace(probe_request(f"several {seed}", seed=seed), stop=(" say", "th"))

                async def lose() -> None:
                    (number,) = (number for number in range(2) if lab.decoders[number].turns.running)
                    await lab.lose_decoder(number)

                assert not await probe_several(lab, oracle, request, n=3, meanwhile=lose, after=7)
            assert not await lab.settled(5)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def seen(sandbox: Sandbox) -> History:
    """What clients saw of a quiet system."""
    with tempfile.TemporaryDirectory(prefix="telltale-", dir="/dev/shm") as folder:
        async with laboratory(Path(folder), sandbox) as lab:
            history = History(lab.roots)
            driver = Driver(lab.clients, history.records.append)
            await driver.ask_all(itertools.islice(Asking(5), 24), at_a_time=6)
    return history


@pytest.mark.asyncio(loop_scope="module")
async def test_every_altered_history_is_found(seen: History, oracle: Oracle) -> None:
    assert not judge(seen, oracle)
    right = [(one, oracle.truth(one.request, seen.roots[one.request.tenant])) for one in sound(seen.records)]
    altered: Counter[str] = Counter()
    for name, (_, alter) in ALTERATIONS.items():
        for record, truth in right:
            changed = copy.deepcopy(record)
            if alter(changed):
                altered[name] += 1
                assert judge_one(changed, truth), (name, changed)
    assert altered.keys() == ALTERATIONS.keys()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_operation_that_is_there_twice_is_found(seen: History, oracle: Oracle) -> None:
    twice = History(seen.roots, records=[*seen.records, seen.records[0]])
    assert [finding.what for finding in judge(twice, oracle)] == ["twice"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_history_that_was_written_is_judged_as_it_was(seen: History, oracle: Oracle, tmp_path: Path) -> None:
    file = io.StringIO()
    writer = Writer(file, seen.roots, {})
    for record in seen.records:
        writer.record(record)
    writer.fault(Fault("store killed", 0.0, 1.0))
    path = tmp_path / "history.jsonl"
    path.write_text(file.getvalue(), encoding="utf-8")
    read = kept.read(path)
    assert (read.records, read.roots) == (seen.records, seen.roots)
    assert not judge(read, oracle)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_lost_worker_excuses_no_answer_and_a_doubtful_entry_does(seen: History, oracle: Oracle) -> None:
    record = copy.deepcopy(next(one for one in sound(seen.records) if len(one.events) > 5))
    del record.events[4:]

    def judged(name: str, reason: str) -> list[str]:
        record.end, record.reason, record.code = "error", reason, "Unavailable"
        faults = [Fault(name, record.begun, record.ended)]
        return [finding.what for finding in judge(History(seen.roots, {}, [record], faults), oracle)]

    assert judged("decoder killed", "DECODER_LOST") == ["status"]
    assert judged("router killed", "CONNECTION_LOST") == ["status"]
    assert judged("region bytes changed", "ENTRY_MISSING") == []
    assert judged("store killed", "ENTRY_MISSING") == ["status"]
