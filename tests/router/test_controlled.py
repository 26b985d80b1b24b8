"""A router and the child that tells it where workers are: whatever the child says or does, what it said last stands."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chiasm.settings import SettingsError
from router.ray_fleet import LINE_BYTES, Controlled
from router.ray_words import Told
from tests.router.child import plan, program
from tests.waiting import alive, gone, until

FIRST = Told({"encoder": ["e:1"], "decoder": ["d:1"]})
SECOND = Told({"encoder": ["e:2"], "decoder": ["d:2"]})


@asynccontextmanager
async def controlled(folder: Path, text: str, *arguments: str, **options: Any) -> AsyncIterator[Controlled]:
    made = Controlled(plan(folder), command=program(text, *arguments), **options)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def says(made: Controlled, target: str) -> None:
    """Waits until that is where the encoder is."""
    async with asyncio.timeout(30):
        while await made.targets("encoder") != [target]:
            await made.changed()


@pytest.mark.parametrize(
    "garbage",
    [
        r"say('{')",
        r"say('{\"targets\": 1, \"asleep\": [], \"hopeless\": []}')",
        r"say('a library prints'); os.write(1, b'\xff\xfe\n')",
        rf"os.write(1, b'x' * {3 * LINE_BYTES}); say('')",
        r"os.write(1, b'no end of a line'); say('')",
    ],
    ids=["cut", "shape", "bytes", "length", "glued"],
)
async def test_what_is_not_understood_is_passed_over(tmp_path: Path, garbage: str) -> None:
    text = f"say(sys.argv[1])\n{garbage}\nsay(sys.argv[2]); hear(os.devnull)"
    async with controlled(tmp_path, text, FIRST.line(), SECOND.line()) as made:
        child = made.pid
        await says(made, "e:2")
        assert made.pid == child or child is None


async def test_a_child_that_says_only_garbage_is_killed_for_its_silence(tmp_path: Path) -> None:
    """And the next one is heard."""
    text = """
if not os.path.exists(sys.argv[2]):
    open(sys.argv[2], "w").write(str(os.getpid()))
    say("{}")
    while True:
        say("nonsense"); time.sleep(0.01)
say(sys.argv[1]); hear(os.devnull)
"""
    note = tmp_path / "first"
    async with controlled(tmp_path, text, FIRST.line(), str(note), silence=0.5) as made:
        await until(lambda: note.exists() and note.read_text() != "")
        await gone(int(note.read_text()))
        await says(made, "e:1")


async def test_what_was_said_last_stands_while_the_child_is_gone_and_while_the_next_knows_nothing(
    tmp_path: Path,
) -> None:
    text = """
if not os.path.exists(sys.argv[2]):
    open(sys.argv[2], "w").close()
    say(sys.argv[1]); sys.exit(3)
say("{}"); hear(os.devnull)
"""
    async with controlled(tmp_path, text, FIRST.line(), str(tmp_path / "first")) as made:
        await says(made, "e:1")
        await until(lambda: made.pid is None)
        assert await made.targets("decoder") == ["d:1"]
        await until(lambda: made.pid is not None)
        assert await made.targets("decoder") == ["d:1"]


async def test_words_for_a_child_that_does_not_read_are_not_kept(tmp_path: Path) -> None:
    async with controlled(tmp_path, "say(sys.argv[1]); time.sleep(600)", FIRST.line(), ending=0.2) as made:
        await says(made, "e:1")
        word = {"waits": {"m" * 10_000: 1.0}}
        told = 0
        while made.say(word):
            told += 1
            assert told < 1000, "somewhere they are"
        assert not made.say(word)
        child = made.pid
        assert child is not None
    assert not alive(child)


async def test_at_the_end_the_child_is_told_to_remove_the_workers(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    async with controlled(tmp_path, "say(sys.argv[1]); hear(sys.argv[2])", FIRST.line(), str(heard)) as made:
        await says(made, "e:1")
    assert heard.read_text().splitlines() == ['{"stop": true}', "end"]


@pytest.mark.parametrize("keep", [True, False])
async def test_at_the_end_a_child_is_told_nothing_if_workers_are_kept_or_none_were_ever_known(
    tmp_path: Path, keep: bool
) -> None:
    heard = tmp_path / "heard"
    said = FIRST.line() if keep else "{}"
    text = "say(sys.argv[1]); open(sys.argv[2], 'w').close(); hear(sys.argv[2])"
    async with controlled(tmp_path, text, said, str(heard), keep=keep) as made:
        if keep:
            await says(made, "e:1")
        await until(heard.exists)
    assert heard.read_text().splitlines() == ["end"]


async def test_at_the_end_a_child_that_had_died_is_started_once_more_to_remove_the_workers(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    text = """
if not os.path.exists(sys.argv[2]):
    open(sys.argv[2], "w").close()
    say(sys.argv[1]); sys.exit(3)
hear(sys.argv[2])
"""
    async with controlled(tmp_path, text, FIRST.line(), str(heard)) as made:
        await says(made, "e:1")
        await until(lambda: made.pid is None)
    assert heard.read_text().splitlines() == ['{"stop": true}', "end"]


async def test_a_child_that_stands_still_at_the_end_is_killed(tmp_path: Path) -> None:
    async with controlled(tmp_path, "say(sys.argv[1]); hear(os.devnull)", FIRST.line(), ending=0.3) as made:
        await says(made, "e:1")
        child = made.pid
        assert child is not None
        os.kill(child, signal.SIGSTOP)
    assert not alive(child)


async def test_a_plan_has_one_router(tmp_path: Path) -> None:
    text = "say(sys.argv[1]); hear(os.devnull)"
    async with controlled(tmp_path, text, FIRST.line()) as made:
        await says(made, "e:1")
        with pytest.raises(SettingsError, match="another router has this plan"):
            async with controlled(tmp_path, text, SECOND.line()):
                pass
        assert made.pid is not None
    async with controlled(tmp_path, text, SECOND.line()) as after:
        await says(after, "e:2")


async def test_reasons_why_there_will_be_no_workers_come_through(tmp_path: Path) -> None:
    text = """say('{"targets": {"encoder": [], "decoder": []}, "asleep": ["m"], "hopeless": [["a", "b", "c"]]}')
hear(os.devnull)"""
    async with controlled(tmp_path, text) as made:
        await asyncio.wait_for(made.changed(), 30)
        assert [tuple(why) for why in made.hopeless] == [("a", "b", "c")]
        assert made.asleep("m") and not made.asleep("n")
