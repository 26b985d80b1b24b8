"""Inputs that end the worker which computes them, between real processes: tried twice, told apart from those that were
beside them, refused, and not tried again. Each test shows how often the worker was ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from chiasm import AsyncClient, Image, InvalidRequest
from tests import digits
from tests.faults.poison import HELD, LONG, PASSES, POISON, SIGNAL, picture
from tests.processes import Role, Trio, trio
from tests.waiting import until

QUESTION = "Which digit is it?"
ENCODER = {"encoder": "tests.faults.poisonous_encoder"}
DECODER = {"decoder": "tests.faults.poisonous_decoder"}


@contextmanager
def flawed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    modules: dict[str, str],
    encoders: int = 1,
    encoder: Sequence[str] = (),
) -> Iterator[Trio]:
    (folder / "passes").touch()
    monkeypatch.setenv(PASSES, str(folder / "passes"))
    with trio(folder, modules=modules, encoders=encoders, encoder=encoder) as served:
        yield served


def passes(folder: Path) -> list[list[str]]:
    """What was computed, pass by pass."""
    return [line.split() for line in (folder / "passes").read_text(encoding="ascii").splitlines()]


def poisoned(folder: Path) -> list[list[str]]:
    return [made for made in passes(folder) if POISON in made]


async def reads(client: AsyncClient, which: int) -> None:
    path, digit = digits.shipped_images()[which]
    got = await client.generate("digits", [Image(path.read_bytes()), QUESTION], max_tokens=8)
    assert str(digit) in got.text


@pytest.mark.timeout(180)
@pytest.mark.parametrize("by", [pytest.param("SIGSEGV", marks=pytest.mark.chaos), "SIGKILL"])
async def test_m5_m7_a_picture_that_ends_encoders_is_tried_twice_and_refused_and_not_tried_again(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SIGNAL, by)
    with flawed(tmp_path, monkeypatch, ENCODER, encoders=3) as served:
        async with AsyncClient(served.target) as client:
            for _ in range(2):
                with pytest.raises(InvalidRequest) as caught:
                    await client.generate("digits", [QUESTION, picture(POISON)], max_tokens=8)
                assert (caught.value.reason, caught.value.item) == ("POISON_INPUT", "messages[0].content[1]")
                assert not caught.value.retryable
            assert len(poisoned(tmp_path)) == 2
            await until(lambda: sum(encoder.code is not None for encoder in served.encoders) == 2)
            await reads(client, 0)
            with pytest.raises(InvalidRequest) as caught:
                await client.generate("digits", [QUESTION, picture(POISON)], max_tokens=8)
        assert len(poisoned(tmp_path)) == 2
        assert served.router.counted()["chiasm_quarantined_total"] == 1


@pytest.mark.timeout(240)
async def test_m8_of_eight_pictures_in_one_pass_the_seven_innocent_are_read_and_the_poison_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with flawed(tmp_path, monkeypatch, ENCODER, encoders=3) as served:
        first, *others = served.encoders
        async with AsyncClient(served.target) as client:
            for other in others:
                await asyncio.to_thread(other.kill)
            await reads(client, 0)  # by the one that is left
            hold = (tmp_path / "passes").with_suffix(HELD)
            hold.touch()
            shown = range(1, len(digits.shipped_images()))
            asked = [asyncio.create_task(reads(client, which)) for which in [*shown][:1]]
            await until(lambda: first.counted()["chiasm_encoder_units_in_flight"] == 1)
            asked += [asyncio.create_task(reads(client, which)) for which in [*shown][1:]]
            poison = asyncio.create_task(client.generate("digits", [QUESTION, picture(POISON)], max_tokens=8))
            await until(lambda: first.counted()["chiasm_encoder_units_in_flight"] == len(asked) + 1)
            for other in others:
                other.start()
            for other in others:
                await asyncio.to_thread(other.wait_for, "ready")
            await until(lambda: served.router.counted()["chiasm_num_requests_running"] == len(asked) + 1)
            hold.unlink()
            with pytest.raises(InvalidRequest) as caught:
                await poison
            assert caught.value.reason == "POISON_INPUT"
            await asyncio.gather(*asked)
        together, alone = poisoned(tmp_path)
        assert len(together) == len(asked), "in one pass with all but the first"
        assert alone == [POISON]


@pytest.mark.timeout(240)
async def test_a_prompt_that_ends_decoders_is_tried_twice_and_who_was_beside_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep(role: Role) -> None:
        while True:
            await until(lambda: role.code is not None, seconds=200)
            role.start()

    with flawed(tmp_path, monkeypatch, DECODER) as served:
        keeping = asyncio.create_task(keep(served.decoder))
        try:
            async with AsyncClient(served.target) as client:
                beside = asyncio.create_task(reads(client, 0))
                for _ in range(2):
                    with pytest.raises(InvalidRequest) as caught:
                        await client.generate("digits", ["again " * LONG], max_tokens=8)
                    assert caught.value.reason == "POISON_INPUT"
                await beside
                await reads(client, 1)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        assert len(poisoned(tmp_path)) == 2
