"""A fresh random checkpoint, divided, against transformers undivided: logits of every row, and greedy answers through
encoder, store, decoder and router."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.form import Form
from chiasm.local import LocalService, LocalSettings
from chiasm.media.types import Rgb
from chiasm.models.registry import Model
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.timeline import unit_name
from decoder_service.engine import DecoderEngine, Work
from tests import checkpoints_qwen3_vl
from tests.asking import ask
from tests.oracles.qwen3_vl.undivided import Laid, Medium, Undivided, lay

TOLERANCE = 1e-5
"""Of a logit, as a share of the largest one."""

TOKENS = 12

Turns: TypeAlias = Sequence[tuple[str, Sequence[str | Medium]]]

TAPS: Sequence[list[int]] = ([2, 0], [0], [1, 3, 2], [], [3, 0, 1])
"""Blocks that are tapped, by seed: what counts is their place in the list."""


@dataclass
class Report:
    """What was compared.

    Attributes:
        worst: of each case, the largest difference of a logit as a share of the largest logit.
        answers: of each case, greedy.
        faults: whatever was not equal.
    """

    worst: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.worst) and not self.faults

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "worst": self.worst, "faults": self.faults}


def checkpoint(folder: Path, seed: int) -> Path:
    """Sizes, taps and head differ from seed to seed."""
    heads, kv_heads = ((6, 2), (4, 4), (4, 1))[seed % 3]
    data = checkpoints_qwen3_vl.config(
        {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 3 + seed % 3},
        {"deepstack_visual_indexes": TAPS[seed % len(TAPS)]},
        tie_word_embeddings=seed % 2 == 1,
    )
    made = checkpoints_qwen3_vl.tensors(data, seed=seed)
    if data["tie_word_embeddings"]:  # of its own size a row would say nothing but its own token
        made["model.language_model.embed_tokens.weight"] *= 0.05
    return checkpoints_qwen3_vl.write(folder, data, made=made)


def cases(seed: int) -> Iterator[tuple[str, Turns]]:
    """Conversations of every kind, with other pictures for every seed."""
    rng = np.random.default_rng(seed)

    def picture(height: int, width: int) -> Rgb:
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)

    def clip(count: int, height: int, width: int) -> Medium:
        return Medium("video", [picture(height, width) for _ in range(count)])

    def image(height: int, width: int) -> Medium:
        return Medium("image", [picture(height, width)])

    yield "text", [("user", ["What is a timeline made of?"])]
    yield "image", [("user", [image(70, 133), "What is this?"])]
    yield "images", [("user", ["First ", image(96, 64), " then ", image(33, 150), image(128, 128), "; compare."])]
    yield "even video", [("user", ["See ", clip(4, 64, 96), " and tell."])]
    yield "odd video", [("user", [clip(5, 70, 64)])]
    yield "mixed", [("user", [clip(3, 64, 64), "between", image(64, 96), clip(2, 96, 64), "behind"])]
    yield (
        "turns",
        [
            ("system", ["Be brief."]),
            ("user", [image(64, 64), "What is it?"]),
            ("assistant", ["A picture."]),
            ("user", ["And this ", clip(2, 64, 64), "?"]),
        ],
    )
    for value in (0, 255):
        flat = np.full((64, 96, 3), value, dtype=np.uint8)
        yield f"all {value}", [("user", [Medium("image", [flat]), Medium("video", [flat, flat, flat]), "Is it flat?"])]


def attached(engine: DecoderEngine, laid: Laid, entries: Sequence[Sequence[Tensor]]) -> None:
    """Attaches the units of all media."""
    for slot, of_medium in enumerate(entries):
        for unit, entry in enumerate(of_medium):
            engine.attach(laid.sequence, unit_name(slot, unit), entry, Form.STATES)


async def compare(seed: int, *, names: Sequence[str] = ()) -> Report:
    """Compares all cases, or those named."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="chiasm-oracle-") as folder:
        path = checkpoint(Path(folder) / f"seed{seed}", seed)
        undivided, model = Undivided(path), Model(path)
        service = await LocalService.start(str(path), LocalSettings(dtype=torch.float32))
        try:
            for name, turns in cases(seed):
                if not names or name in names:
                    await _compare_case(report, name, turns, model, undivided, service)
        finally:
            await service.close()
    alike = [name for name, ids in report.answers.items() if len(set(ids)) <= TOKENS // 4]
    if 2 * len(alike) > len(report.answers):
        report.faults.append(f"the answers to {', '.join(alike)} repeat themselves: equal ones say little")
    return report


async def _compare_case(
    report: Report, name: str, turns: Turns, model: Model, undivided: Undivided, service: LocalService
) -> None:
    encoder, decoder = model.encoder(dtype=torch.float32), model.decoder(dtype=torch.float32)
    engine = DecoderEngine(decoder, model.processor, text_tokens=2048, visual_tokens=2048)
    laid = lay(model, turns, engine.sequence())
    with torch.inference_mode():
        attached(engine, laid, [encoder.encode_states(units, TorchVarlen()) if units else [] for units in laid.units])
    (logits,) = engine.step([Work(laid.sequence, len(laid.ids), "all")])
    expected = undivided.logits(laid)
    apart = float((logits - expected).abs().max() / expected.abs().max())
    report.worst[name] = apart
    if not apart <= TOLERANCE:
        report.faults.append(f"{name}: logits are {apart:.2e} of the largest apart")
    answer = await ask(service, request(turns, model=service.name))
    greedy = undivided.greedy(laid, TOKENS, sorted(model.prompt().banned_ids))
    report.answers[name] = greedy
    if answer.ids != greedy:
        report.faults.append(f"{name}: {answer.ids} is answered, undivided {greedy}")
    assert answer.started is not None
    if answer.started.prompt_tokens != len(laid.ids):
        report.faults.append(f"{name}: {answer.started.prompt_tokens} tokens are laid, not {len(laid.ids)}")


def request(turns: Turns, *, model: str, tokens: int = TOKENS) -> rpb.GenerateRequest:
    """The same conversation for a router: greedy, pixels as they are."""
    made = rpb.GenerateRequest(model=model)
    roles = {"system": pb.ROLE_SYSTEM, "user": pb.ROLE_USER, "assistant": pb.ROLE_ASSISTANT}
    for role, parts in turns:
        turn = made.prompt.conversation.turns.add(role=roles[role])
        for part in parts:
            if isinstance(part, str):
                turn.parts.add(text=part)
            else:
                turn.parts.add(slot=len(made.media))
                made.media.append(_medium(part))
    made.sampling.max_tokens = tokens
    made.sampling.ignore_eos = True
    return made


def _medium(medium: Medium) -> pb.Media:
    kind = pb.MEDIA_KIND_IMAGE if medium.kind == "image" else pb.MEDIA_KIND_VIDEO
    height, width, _ = medium.frames[0].shape
    layout = pb.RawLayout(size=pb.Size(height=height, width=width), channels=3)
    frames = [pb.Frame(header=pb.FrameHeader(raw=layout), data=frame.tobytes()) for frame in medium.frames]
    fps = medium.fps if medium.kind == "video" else None
    return pb.Media(kind=kind, frames=pb.FrameSequence(frames=frames, fps=fps))
