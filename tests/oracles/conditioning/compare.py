"""A fresh random checkpoint, divided, whole and cut after a layer, against transformers undivided: the states of every
token after every layer, through client, router, encoder, store and decoder.

What transformers returns as hidden states is not what is compared: each is taken before the deepstack add, and the last
is normed. Taken here is what the next layer is given, and of the last layer what the norm is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.client import AsyncClient, Content, Frames, Image
from chiasm.client.types import Part
from chiasm.local import LocalService, LocalSettings
from chiasm.media.types import Rgb
from chiasm.models.registry import Model
from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service import convert
from decoder_service.sequence import DecodeSequence
from tests.oracles.qwen3_vl.compare import TAPS, checkpoint
from tests.oracles.qwen3_vl.undivided import Laid, Medium, Undivided, lay_pieces

TOLERANCE = 1e-5
"""Of a number, as a share of the largest one."""

Parts = Sequence[str | Medium]


@dataclass
class Report:
    """What was compared.

    Attributes:
        worst: of each case and decoder, the largest difference as a share of the largest number.
        faults: whatever was not equal.
        cut: after which layer.
        taps: how many layers have features added behind them.
    """

    cut: int
    taps: int
    worst: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.worst) and not self.faults

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "cut": self.cut, "taps": self.taps, "worst": self.worst, "faults": self.faults}


def cut_of(seed: int, depth: int) -> int:
    """After which layer: every one in turn, the first and the last too."""
    return 1 + seed * seed % depth


def cases(seed: int) -> Iterator[tuple[str, Parts]]:
    """Prompts of every kind, with other pictures for every seed."""
    rng = np.random.default_rng(seed)

    def picture(height: int, width: int) -> Rgb:
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)

    def image(height: int, width: int) -> Medium:
        return Medium("image", [picture(height, width)])

    def clip(count: int, height: int, width: int) -> Medium:
        return Medium("video", [picture(height, width) for _ in range(count)])

    yield "text", ["A red fox in the snow, at dusk."]
    yield "image", [image(70, 133), "a red fox"]
    yield "image alone", [image(64, 96)]
    yield "adjacent images", [image(96, 64), image(33, 150), image(128, 128)]
    yield "even video", ["See ", clip(4, 64, 96), " and tell."]
    yield "odd video", [clip(5, 70, 64)]
    yield "both", [clip(3, 64, 64), "between", image(64, 96), clip(2, 96, 64), "behind"]
    yield "video behind image", [image(64, 64), clip(2, 64, 64)]


def content_of(parts: Parts) -> Content:
    """As a client is given them."""
    made: list[Part] = []
    for part in parts:
        if isinstance(part, str):
            made.append(part)
        else:
            made.append(Image(part.frames[0]) if part.kind == "image" else Frames(part.frames, fps=part.fps))
    return made


def lay_parts(model: Model, parts: Parts, sequence: DecodeSequence) -> Laid:
    """Lays a prompt without a template."""
    media = [part for part in parts if isinstance(part, Medium)]
    kinds = {
        slot: pb.MEDIA_KIND_IMAGE if medium.kind == "image" else pb.MEDIA_KIND_VIDEO
        for slot, medium in enumerate(media)
    }
    prompt, slots = pb.Prompt(), iter(kinds)
    for part in parts:
        prompt.plain.parts.append(pb.Part(text=part) if isinstance(part, str) else pb.Part(slot=next(slots)))
    pieces = convert.read_prompt(prompt, model.prompt(), model.config.text.vocab_size, kinds).pieces
    return lay_pieces(model, pieces, media, sequence)


@torch.inference_mode()
def states_of(undivided: Undivided, laid: Laid) -> list[Tensor]:
    """(rows, width) after each layer, as transformers' own computes them: what follows a layer is given."""
    text = undivided.model.model.language_model
    taken: list[Tensor] = []

    def taking(module: object, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        (states,) = arguments or (named["hidden_states"],)
        taken.append(states[0].clone())

    hooks = [one.register_forward_pre_hook(taking, with_kwargs=True) for one in (*text.layers[1:], text.norm)]
    try:
        undivided.model(**undivided.inputs(laid))
    finally:
        for hook in hooks:
            hook.remove()
    return taken


async def compare(
    seed: int, *, names: Sequence[str] = (), change: Callable[[Path], Path] = lambda path: path
) -> Report:
    """Compares all cases, or those named.

    Args:
        change: what is done to the folder that is served.
    """
    with tempfile.TemporaryDirectory(prefix="chiasm-oracle-") as folder:
        path = checkpoint(Path(folder) / f"seed{seed}", seed)
        undivided = Undivided(path)
        path = change(path)
        depth = Model(path).config.text.num_hidden_layers
        report = Report(cut_of(seed, depth), len(TAPS[seed % len(TAPS)]))
        for layers, label in ((None, "whole"), (report.cut, "cut")):
            settings = LocalSettings(dtype=torch.float32, condition_layers=layers)
            model = Model(path, condition_layers=layers)
            client = AsyncClient(transport=_opener(path, settings))
            try:
                for name, parts in cases(seed):
                    if not names or name in names:
                        await _compare_case(
                            report, f"{name}, {label}", parts, model, undivided, client, layers or depth
                        )
            finally:
                await client.close()
    return report


def _opener(path: Path, settings: LocalSettings) -> Callable[[], Any]:
    async def opened() -> LocalService:
        return await LocalService.start(str(path), settings)

    return opened


async def _compare_case(
    report: Report, name: str, parts: Parts, model: Model, undivided: Undivided, client: AsyncClient, last: int
) -> None:
    laid = lay_parts(model, parts, DecodeSequence(model.processor.unit_layout, overlaid=True))
    expected = states_of(undivided, laid)
    layers = [*range(last, 0, -1)]
    told = await client.condition(model.name, content_of(parts), layers=layers)
    alone = await client.condition(model.name, content_of(parts), layer=last)
    worst = 0.0
    for number, states in zip([*layers, last], [*told.states, alone.states], strict=True):
        worst = max(worst, apart(states, expected[number - 1]))
    report.worst[name] = worst
    if not worst <= TOLERANCE:
        report.faults.append(f"{name}: states are {worst:.2e} of the largest apart")
    if told.states.shape != (last, len(laid.ids), model.config.text.hidden_size):
        report.faults.append(f"{name}: states of shape {told.states.shape} for {len(laid.ids)} tokens")


def apart(states: npt.NDArray[np.floating[Any]], expected: Tensor) -> float:
    """The largest difference as a share of the largest number. Infinite for another shape."""
    if states.shape != expected.shape:
        return float("inf")
    return float(np.abs(states - expected.numpy()).max() / expected.abs().max())
