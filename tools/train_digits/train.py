"""The training loop: batches of one task and one length, through both halves, with the dense attention backend.

Knows how batches are fed and steps are taken; what is asked is `episodes`', how digits look is `data`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chiasm.attention.dense import DenseAttention
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.media.patches import normalise, to_patches
from chiasm.models.moss_vl.text import MossVLDecoder
from chiasm.models.moss_vl.vision import MossVLEncoder
from chiasm.tokenizer import Tokenizer
from tools.train_digits import model
from tools.train_digits.data import EMPTY, SIDE, Digits, draw, split
from tools.train_digits.episodes import TASKS, Batch, Episode, Form, Task, Writer, collate, draw_episode


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run does.

    Attributes:
        steps: of the whole cycle of the learning rate.
        stop: steps after which the run ends, where that is before the cycle does.
        batch: episodes of a step, all of one task and of equally many frames.
        short_share: share of the steps in which clips have `short` frames at most.
        shares: of the steps, per task.
        questions: by time about one clip at most.
        images: share of the clips to be read that are images.
        regular, time_first: as in `draw_episode`.
        long_times: questions by time are asked about longer clips: among few frames there is little to tell apart.
    """

    steps: int
    stop: int | None = None
    batch: int = 32
    rate: float = 2e-3
    warmup: int = 300
    weight_decay: float = 0.02
    short: int = 4
    long: int = 8
    short_share: float = 0.25
    shares: tuple[float, float, float] = (0.35, 0.45, 0.2)
    questions: int = 4
    images: float = 0.4
    regular: float = 0.7
    time_first: float = 0.3
    long_times: bool = False
    empty_share: float = 0.3
    seed: int = 20_240


SHIPPED_PLANS = (
    Plan(steps=6_000, stop=4_000),
    Plan(
        steps=2_100,
        rate=1e-3,
        warmup=50,
        short_share=0.0,
        shares=(0.25, 0.65, 0.1),
        regular=0.85,
        time_first=0.2,
        long_times=True,
        seed=20_241,
    ),
    Plan(
        steps=900,
        rate=7e-4,
        warmup=30,
        short_share=0.0,
        shares=(0.55, 0.3, 0.15),
        images=0.55,
        regular=0.85,
        time_first=0.2,
        seed=20_242,
    ),
)
"""How the shipped checkpoint was trained: three runs, each from the weights of the one before as they were saved."""


def cross_of(entry: Tensor, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Per cross layer the keys and the values, each (B, heads, S, dim), of placed (layers, 2, heads, B * S, dim)."""
    placed = entry.unflatten(3, (batch, -1)).transpose(2, 3)  # (layers, 2, B, heads, S, dim)
    return [(layer[0], layer[1]) for layer in placed]


def encode(encoder: MossVLEncoder, frames_n3hw: Tensor) -> Tensor:
    """uint8 frames of 64x64, (N, 3, 64, 64), to one entry of all their vision tokens: (layers, 2, heads, S, dim)."""
    v = encoder.config.vision
    count = len(frames_n3hw)
    # Patches run over blocks row by row, so frames stacked on height come out one after another.
    stacked = frames_n3hw.transpose(0, 1).reshape(3, count * SIDE, SIDE)
    patches = to_patches(normalise(stacked), v.patch_size, v.spatial_merge_size)
    grid = (SIDE // v.patch_size, SIDE // v.patch_size)
    return torch.cat(encoder.encode_patches(patches, [grid] * count, TorchVarlen()), dim=3)


def logits_of(decoder: MossVLDecoder, entry: Tensor, batch: Batch) -> Tensor:
    """(taught rows, vocabulary) logits of a batch, given its frames' entry before rotation, which may hold no frame."""
    count = len(batch.ids_bt)
    sees = (batch.boundaries_bt2[..., 1] > batch.boundaries_bt2[..., 0]).flatten() if entry.shape[3] else None
    cross = [] if sees is None else cross_of(decoder.place(entry, batch.key_positions_3s), count)
    attention = DenseAttention(count, cross, batch.boundaries_bt2)
    logits: Tensor = decoder(batch.ids_bt.flatten(), batch.positions_3bt.flatten(1), sees, batch.logits_at, attention)
    return logits


class Source:
    """Random batches of the training digits, reproducible from a seed."""

    def __init__(self, digits: Digits, writer: Writer, plan: Plan) -> None:
        self._cells = torch.from_numpy(digits.cells)
        self._labels = digits.labels
        self._writer = writer
        self._plan = plan
        self._rng = np.random.default_rng(plan.seed)
        self._generator = torch.Generator().manual_seed(plan.seed)

    def task(self) -> Task:
        return TASKS[int(self._rng.choice(len(TASKS), p=self._plan.shares))]

    def length(self, task: Task, *, short: bool) -> int:
        """Frames of a batch."""
        lengths = self._rng.integers(1, 1 + (self._plan.short if short else self._plan.long), size=2)
        return int(lengths.max() if task == "time" and self._plan.long_times else lengths[0])

    def draw(self, task: Task, frames: int) -> tuple[list[Episode], Tensor]:
        """Episodes of a task, and the pictures of all their frames."""
        plan, rng, count = self._plan, self._rng, self._plan.batch * frames
        chosen = rng.integers(len(self._labels), size=count)
        empty = rng.random(count) < (self._plan.empty_share if task == "stream" else 0.0)
        shown = np.where(empty, EMPTY, self._labels[chosen]).reshape(-1, frames)
        form = Form.draw(task, frames, rng, questions=plan.questions, images=plan.images)
        episodes = [
            draw_episode(self._writer, task, row.tolist(), form, rng, regular=plan.regular, time_first=plan.time_first)
            for row in shown
        ]
        pictures = draw(self._cells[chosen], torch.from_numpy(~empty), self._generator)
        return episodes, pictures


def rate_at(step: int, plan: Plan) -> float:
    """One cycle: up in a straight line, down along a cosine to a hundredth."""
    if step < plan.warmup:
        return plan.rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def optimiser(halves: Sequence[nn.Module], plan: Plan) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms, biases and gates alone."""
    parameters = [p for half in halves for p in half.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), foreach=True)


def train(
    plan: Plan, target: Path, *, start: Path | None = None, checkpoints: Path | None = None, every: int = 500
) -> None:
    """Trains and writes the checkpoint to `target`; with `checkpoints` also there, every `every` steps.

    Begins with the weights of the folder `start`, or with random ones.

    Prints a line per 100 steps: the loss and the share of right tokens of each task since the last line.
    """
    config = model.configuration()
    writer = Writer(config, Tokenizer(model.tokenizer_json()))
    generator = torch.Generator().manual_seed(plan.seed)
    encoder, decoder = model.fresh(config, generator) if start is None else model.saved(start)
    source = Source(split()[0], writer, plan)
    halves = (encoder, decoder)
    parameters = [p for half in halves for p in half.parameters()]
    print(f"{sum(p.numel() for p in parameters)} parameters, {torch.get_num_threads()} threads", flush=True)
    optimizer = optimiser(halves, plan)
    tally: dict[str, list[tuple[float, float]]] = {}
    began = time.monotonic()
    for step in range(plan.stop or plan.steps):
        task = source.task()
        frames = source.length(task, short=step < plan.short_share * plan.steps)
        episodes, pictures = source.draw(task, frames)
        batch = collate(episodes, writer)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, plan)
        logits = logits_of(decoder, encode(encoder, pictures), batch)
        loss = F.cross_entropy(logits, batch.targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        right = (logits.argmax(-1) == batch.targets).float().mean().item()
        tally.setdefault(task, []).append((loss.item(), right))
        if (step + 1) % 100 == 0:
            report = "  ".join(
                f"{name} {np.mean([t[0] for t in seen]):.3f} {np.mean([t[1] for t in seen]):.3f}"
                for name, seen in sorted(tally.items())
            )
            print(f"{step + 1:6d}  {time.monotonic() - began:6.0f} s  {report}", flush=True)
            tally.clear()
        if checkpoints is not None and (step + 1) % every == 0:
            model.save(checkpoints, encoder, decoder)
    model.save(target, encoder, decoder)
