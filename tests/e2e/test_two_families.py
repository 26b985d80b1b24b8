"""Two models of two families under one router: sixteen requests of each at once, each answered by its own.

The workers of one of them have a folder each that holds their half and nothing else, in the names of older checkpoints.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pytest
from safetensors.torch import load_file

from chiasm import AsyncClient, Frames, Image, SamplingParams, Video
from chiasm.cache.region import Region
from chiasm.client import Content
from chiasm.models.checkpoint import split
from chiasm.models.registry import SHIPPED, Model
from chiasm.models.weights import HalfName
from decoder_service.sequence import DecodeSequence
from tests import digits
from tests.checkpoints_qwen3_vl import older, split_qkv, write
from tests.e2e.test_digits import drawn
from tests.oracles.qwen3_vl.compare import TOKENS, checkpoint
from tests.oracles.qwen3_vl.undivided import Medium, Undivided, lay
from tests.processes import Role, secret

AT_ONCE = 16
SEED = 4
HALVES: Sequence[HalfName] = get_args(HalfName)


class Served(NamedTuple):
    """A router over a pair of workers of each model.

    Attributes:
        folder: of the checkpoint that is no `digits`.
    """

    router: Role
    workers: list[Role]
    folder: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("both")
    other = checkpoint(folder / "qwen", SEED)
    workers_key, tenants_key = (secret(folder / name) for name in ("workers.key", "tenants.key"))
    plain = ["--http", "127.0.0.1:0", "--drain-seconds", "1"]
    with ExitStack() as stack:
        region = Region.create(folder / "arena", 64 << 20)
        stack.callback(region.close)
        places: dict[str, list[str]] = {"encoder": [], "decoder": []}
        workers = []
        for folders in (dict.fromkeys(places, SHIPPED / "digits"), _halves(folder, other)):
            for role, known in places.items():
                model = folders[role]
                known.append(f"unix:{folder}/{role}-{model.name}.sock")
                told = ["--model", str(model), "--arena", str(region.path), "--workers-secret-file", str(workers_key)]
                extra = ["--dtype", "float32", "--listen", known[-1]]
                workers.append(Role(f"{role}_service", [*told, *plain, *extra], folder))
        fleet = ["--encoders", ",".join(places["encoder"]), "--decoders", ",".join(places["decoder"])]
        router = Role(
            "router", ["--listen", "127.0.0.1:0", *plain, *fleet, "--tenants-secret-file", str(tenants_key)], folder
        )
        for one in (*workers, router):
            stack.callback(one.end)
            one.start()
        for one in (*workers, router):
            one.wait_for("ready", seconds=180)
        yield Served(router, workers, other)


def _halves(folder: Path, whole: Path) -> dict[str, Path]:
    """Folders of the same name with the encoder's and the decoder's weights of a checkpoint."""
    stored = older(split_qkv(load_file(whole / "model.safetensors")))
    config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    model = Model(write(folder / "older" / whole.name, config, made=stored))
    folders: dict[str, Path] = {}
    for half in HALVES:
        folders[half] = folder / half / whole.name
        split(model.checkpoint, model.weights.names(half), folders[half])
    return folders


@pytest.mark.timeout(300)
async def test_sixteen_of_each_at_once_are_answered_by_their_own_model(both: Served) -> None:
    rng = np.random.default_rng(SEED)
    model, undivided = Model(both.folder), Undivided(both.folder)
    banned = sorted(model.prompt().banned_ids)
    asked: list[tuple[str, Content]] = []
    expected: list[list[int] | list[str]] = []
    for number in range(AT_ONCE):
        frames, shown = drawn(rng, 1 + number % 5)
        asked.append(("digits", [Video(digits.clip(frames)), "Read the digits."]))
        expected.append([str(one) for one in shown])
        medium = _picture(rng) if number % 2 else _clip(rng, 2 + number % 3)
        question = f"Number {number}?"
        laid = lay(model, [("user", [medium, question])], DecodeSequence(model.processor.unit_layout))
        asked.append(("qwen", [_shown(medium), question]))
        expected.append(undivided.greedy(laid, TOKENS, banned))
    assert len({tuple(wanted) for wanted in expected[1::2]}) == AT_ONCE, "an answer says whose it is"
    async with AsyncClient(both.router.target) as client:
        assert {one.name for one in await client.list_models()} == {"digits", "qwen"}
        answers = await asyncio.gather(
            *(
                client.generate(name, content, max_tokens=TOKENS, sampling=SamplingParams(ignore_eos=name == "qwen"))
                for name, content in asked
            )
        )
    right = total = 0
    for (name, _), answer, wanted in zip(asked, answers, expected, strict=True):
        if name == "qwen":
            assert list(answer.ids) == wanted
        else:
            said = answer.text.split()
            right += sum(a == b for a, b in zip(said, wanted, strict=False))
            total += max(len(said), len(wanted))
    assert right / total >= 0.95, f"{right} of {total} digits"


def _picture(rng: np.random.Generator) -> Medium:
    return Medium("image", [rng.integers(0, 256, (64, 96, 3), dtype=np.uint8)])


def _clip(rng: np.random.Generator, count: int) -> Medium:
    return Medium("video", [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(count)])


def _shown(medium: Medium) -> Image | Frames:
    if medium.kind == "image":
        return Image(medium.frames[0])
    return Frames(list(medium.frames), fps=medium.fps)
