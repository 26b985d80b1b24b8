"""Sizes, frames and patches against what is recorded: raw pixels in, exact numbers out. No model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chiasm.media.patches import normalise, resize, to_patches
from chiasm.media.sample import SamplingOptions, pick, share_frames
from chiasm.models.family import MediumFacts
from chiasm.models.moss_vl.processing import MossVLProcessor
from chiasm.rpc.limits import MAX_FRAMES
from tests.oracles.moss_vl.report import Report

_ALL = SamplingOptions(every_frame=True)


def media(
    report: Report, processor: MossVLProcessor, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Every `media.{name}.raw_u8`: its size by the family's rule, its resized pixels, its grid and its patches."""
    vision = processor.config.vision
    for name in [n.removesuffix(".raw_u8") for n in inputs if n.startswith("media.") and n.endswith(".raw_u8")]:
        raw = inputs[f"{name}.raw_u8"]
        frames = raw if raw.dim() == 4 else raw.unsqueeze(0)
        height, width = _size(processor, raw)
        resized = resize(frames, height, width)
        if f"{name}.resized_u8" in expected:
            report.equal(
                f"{name}.resized_u8", resized if raw.dim() == 4 else resized[0], expected[f"{name}.resized_u8"]
            )
        grid = [len(frames), height // vision.patch_size, width // vision.patch_size]
        if f"{name}.grid_thw" in inputs:
            report.equal(f"{name}.grid_thw", grid, inputs[f"{name}.grid_thw"].reshape(-1))
        if f"{name}.pixel_values" in inputs:
            patches = [to_patches(normalise(f), vision.patch_size, vision.spatial_merge_size) for f in resized]
            report.equal(f"{name}.pixel_values", torch.cat(patches), inputs[f"{name}.pixel_values"])


def _size(processor: MossVLProcessor, raw: Tensor) -> tuple[int, int]:
    height, width = raw.shape[-2:]
    if raw.dim() == 4:
        facts = MediumFacts("video", height, width, raw.shape[0], float(raw.shape[0]), _ALL)
    else:
        facts = MediumFacts("image", height, width, 1, 0.0, SamplingOptions())
    plan = processor.size([facts])[0]
    return plan.height, plan.width


def tables(report: Report, processor: MossVLProcessor, recorded: Mapping[str, Any]) -> None:
    """The tables `image_resize`, `video_resize`, `frame_sampling` and `frame_budget_split`, where they are there."""
    _images(report, processor, recorded.get("image_resize", []))
    _videos(report, processor, recorded.get("video_resize", []))
    _sampling(report, processor, recorded.get("frame_sampling", []))
    for i, row in enumerate(recorded.get("frame_budget_split", [])):
        got = share_frames(row["durations"], row["max_frames"])
        report.equal(f"preprocessing.frame_budget_split.{i}", got, row["allocation"])


def _images(report: Report, processor: MossVLProcessor, rows: Sequence[Mapping[str, Any]]) -> None:
    for i, row in enumerate(rows):
        plans = processor.size([MediumFacts("image", h, w, 1, 0.0, SamplingOptions()) for h, w in row["images"]])
        report.equal(f"preprocessing.image_resize.{i}", [[p.height, p.width] for p in plans], row["resized"])


def _videos(report: Report, processor: MossVLProcessor, rows: Sequence[Mapping[str, Any]]) -> None:
    # The rows give frame counts as they are, some beyond what a request may use: the cap on frames is another table's.
    uncapped = MossVLProcessor(processor.config, replace(processor.budgets, max_frames=MAX_FRAMES))
    for i, row in enumerate(rows):
        plans = uncapped.size([MediumFacts("video", h, w, t, float(t), _ALL) for t, h, w in row["videos"]])
        report.equal(f"preprocessing.video_resize.{i}", [[p.height, p.width] for p in plans], row["resized"])


def _sampling(report: Report, processor: MossVLProcessor, rows: Sequence[Mapping[str, Any]]) -> None:
    for i, row in enumerate(rows):
        name, frames = f"preprocessing.frame_sampling.{i}", row["total_frames"]
        facts = MediumFacts("video", 64, 64, frames, row["duration"], SamplingOptions())
        count = processor.size([facts])[0].units
        report.equal(f"{name}.n", [count], [row["n"]])
        offsets = [frame / row["src_fps"] for frame in range(frames)]
        chosen = pick(offsets, SamplingOptions(), count)
        kept = len(row["indices"])  # the recorded lists are cut where they are long
        report.equal(f"{name}.indices", chosen[:kept], row["indices"])
        # Tenths of a second, which is what a prompt shows of them.
        shown = [float(f"{offsets[frame]:.1f}") for frame in chosen[:kept]]
        report.equal(f"{name}.timestamps", shown, [float(stamp) for stamp in row["timestamps"]])
