"""Requests of a family whose unit is two frames: shared out among encoders, over entries that are lost, behind encoders
and decoders that are lost, the answer of one undivided pass."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from chiasm.local import LocalService, LocalSettings
from chiasm.models.registry import Model
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import router_pb2 as rpb
from decoder_service.sequence import DecodeSequence
from router.spread import Spread
from tests import checkpoints_qwen3_vl
from tests.asking import ask, forget, running
from tests.e2e.test_requests import settled
from tests.oracles.qwen3_vl.compare import TOKENS, Turns, request
from tests.oracles.qwen3_vl.undivided import Medium, Undivided, lay
from tests.router.scripted import Meddle, MeddledFleet, answer, untouched
from tests.router.test_coordinator import dies_before

TWO = Spread(encoders=2, least=2, turn=1)
FRAMES = 9
UNITS = 5


class Asked(NamedTuple):
    """A question about a video, and what an undivided model says."""

    folder: Path
    turns: Turns
    expected: list[int]

    @property
    def request(self) -> rpb.GenerateRequest:
        return request(self.turns, model="pairs")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    folder = checkpoints_qwen3_vl.write(tmp_path_factory.mktemp("spans") / "pairs", seed=5)
    rng = np.random.default_rng(5)
    frames = [rng.integers(0, 256, (64, 96, 3), dtype=np.uint8) for _ in range(FRAMES)]
    turns: Turns = [("user", ["See ", Medium("video", frames), " and tell."])]
    model = Model(folder)
    laid = lay(model, turns, DecodeSequence(model.processor.unit_layout))
    return Asked(folder, turns, Undivided(folder).greedy(laid, TOKENS, sorted(model.prompt().banned_ids)))


@asynccontextmanager
async def serving(asked: Asked) -> AsyncIterator[LocalService]:
    async with running(str(asked.folder), LocalSettings(dtype=torch.float32)) as service:
        yield service


async def test_each_of_two_encoders_makes_its_share_of_units_and_no_unit_is_made_twice(asked: Asked) -> None:
    async with serving(asked) as service:
        fleet = MeddledFleet(service, others=[untouched])
        got = await answer(fleet, asked.request, spread=TWO)
        assert got.ids == asked.expected and got.encoded == UNITS == service.encoder.counts.encoded_units
        assert fleet.encoders is not None
        assert [run.first for run in fleet.encoders.goes[0].units] == [0, 2, 4]
        assert [run.first for run in fleet.others[1].goes[0].units] == [1, 3] and fleet.others[1].goes[0].part
        (usage,) = got.media
        assert (usage.frames_used, usage.units) == (FRAMES, UNITS)
        await settled(service)


@pytest.mark.parametrize("before", ["sized", "ready", "end"])
@pytest.mark.parametrize("who", ["first", "other", "decoder"])
async def test_whoever_is_lost_at_any_stage_is_replaced(asked: Asked, who: str, before: str) -> None:
    stage = {"sized": "admitted", "ready": "attached", "end": "tokens"}[before] if who == "decoder" else before
    meddles: dict[str, Meddle] = dict.fromkeys(("first", "other", "decoder"), untouched) | {who: dies_before(stage)}
    async with serving(asked) as service:
        fleet = MeddledFleet(service, encoder=meddles["first"], others=[meddles["other"]], decoder=meddles["decoder"])
        got = await answer(fleet, asked.request, spread=TWO)
        assert got.ids == asked.expected and len(fleet.lost_workers) == 1
        await forget(service)  # nobody is left who would take back the pins of the call that broke
        await settled(service)


@pytest.mark.parametrize("lost", [[0], [UNITS - 1], [1, 3], list(range(UNITS))], ids=str)
async def test_entries_that_are_gone_are_made_again_of_the_same_frames(asked: Asked, lost: list[int]) -> None:
    async with serving(asked) as service:
        first = await ask(service, asked.request)
        keys = list(service.store.held())
        service.decoder.flush()
        for unit in lost:
            await service.store.discard(keys[unit])
        again = await ask(service, asked.request)
        assert first.ids == again.ids == asked.expected
        assert again.media[0].frames_used == FRAMES and again.encoded <= UNITS


async def test_what_is_told_of_units_in_sight_is_of_both_frames(asked: Asked) -> None:
    told = asked.request
    told.prompt_visibility = True
    async with serving(asked) as service:
        got = await ask(service, told)
        assert got.started is not None
        assert [to_seconds(frame.frame_offset) for frame in got.started.frames] == [n / 2 for n in range(FRAMES)]
        assert [(frame.unit, frame.index) for frame in got.started.frames] == [(n // 2, n) for n in range(FRAMES)]
        assert got.visible[-1].count == UNITS
        assert to_seconds(got.visible[-1].visible_until_offset) == (FRAMES - 1) / 2
