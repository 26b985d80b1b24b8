"""The comparison: every recorded tensor of a folder against this project's halves, in the order of a request.

What is compared follows from what the folder holds: `{case}.input_ids` makes a case, `{stream}.init_ids` a growing one,
`.bf16.` a second run in bfloat16. The recorded `hf` decode rule is not followed: here the query is always rotated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from chiasm.cache.entry import Contract
from chiasm.cache.form import Form
from decoder_service.sampler import Drawing, draw
from tests.oracles.moss_vl import preprocessing
from tests.oracles.moss_vl.halves import Capture, Halves, Medium, Stream
from tests.oracles.moss_vl.report import BF16_LOGITS, Report, claim

RULE = "rotated"


@dataclass(frozen=True)
class Recorded:
    """A folder of the format: what goes in, what must come out, and the tables beside them."""

    inputs: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    tables: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        tables = folder / "oracle.json"
        return cls(
            load_file(folder / "inputs.safetensors"),
            load_file(folder / "expected.safetensors"),
            json.loads(tables.read_text(encoding="utf-8")) if tables.exists() else {},
        )

    def media(self, name: str) -> list[Medium]:
        """The media of a case or of a realtime step, in order of appearance."""
        grids = self.inputs.get(f"{name}.grid_thw")
        return [] if grids is None else [(t, h, w) for t, h, w in grids.reshape(-1, 3).tolist()]

    def greedy(self, name: str) -> list[int] | None:
        """Continuations as oracle.json lists them, beside or instead of the tensors."""
        listed: list[int] | None = self.tables.get("greedy_ids", {}).get(name)
        return listed

    def cases(self, ending: str) -> list[str]:
        return [name.removesuffix(ending) for name in self.inputs if name.endswith(ending)]


def compare(encoder: Path, decoder: Path, oracle: Path, *, form: Form = Form.CROSS_KV) -> Report:
    """Compares everything a folder holds.

    Args:
        encoder, decoder: checkpoint folders of the two halves, usually the same.
        oracle: the folder with `inputs.safetensors` and `expected.safetensors`.
        form: of the entries between the halves.

    Raises CheckpointError for a checkpoint that cannot be loaded whole, OSError for files that are not there. A fault
    in one case is a finding: the others are still compared.
    """
    recorded = Recorded.read(oracle)
    halves = Halves(encoder, decoder, torch.float32, form=form)
    report = Report()

    def guarded(name: str, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:
            report.faults.append(f"{name}: {type(error).__name__}: {error}")

    if "cross_attention_layers" in recorded.tables:
        layers = halves.config.text.cross_attention_layers
        report.equal("cross_attention_layers", layers, recorded.tables["cross_attention_layers"])
    guarded("media", lambda: preprocessing.media(report, halves.processor, recorded.inputs, recorded.expected))
    tables = recorded.tables.get("preprocessing", {})
    guarded("preprocessing", lambda: preprocessing.tables(report, halves.processor, tables))
    for case in recorded.cases(".input_ids"):
        guarded(case, partial(_Case(report, recorded, halves, case).run))
    for name in recorded.cases(".init_ids"):
        guarded(name, partial(_Growing(report, recorded, halves, name).run))
    cases = recorded.cases(".input_ids")
    rounded = [case for case in cases if any(name.startswith(f"{case}.bf16.") for name in recorded.expected)]
    if rounded:
        small = Halves(encoder, decoder, torch.bfloat16, form=form)
        for case in rounded:
            guarded(f"{case}.bf16", partial(_Case(report, recorded, small, case).run_rounded))
    claim(report, recorded.expected)
    return report


@dataclass
class _Case:
    """One recorded prompt with its media."""

    report: Report
    recorded: Recorded
    halves: Halves
    name: str

    def _check(
        self, how: Callable[..., None], tensor: str, got: Tensor | Sequence[object] | None, **options: Tensor
    ) -> None:
        """Compares if the folder expects that tensor and it was made."""
        expected = self.recorded.expected.get(f"{self.name}.{tensor}")
        if expected is not None and got is not None:
            how(f"{self.name}.{tensor}", got, expected, **options)

    def run(self) -> None:
        capture = Capture()
        media, entries = self._publish(capture)
        self._vision(capture, entries)
        stream = self._stream(self._ids, media, entries)
        self._timeline(stream)
        for number, layer in enumerate(self.halves.config.text.cross_attention_layers if entries else ()):
            self._check(self.report.close, f"layer{layer}.k_post_rope", stream.attached_keys(number))
        prefill = stream.compute("all", capture)
        self._layers(capture, torch.from_numpy(stream.timeline.visible() > 0))
        self._check(self.report.close, "prefill_logits", prefill)
        self._greedy(stream, prefill[-1], media, entries)

    def run_rounded(self) -> None:
        """The same prefill with weights, entries and activations in bfloat16."""
        capture = Capture()
        media, entries = self._publish(capture)
        self._check(self.report.near, "bf16.vision_merged", capture.joined("merged"))
        logits = self._stream(self._ids, media, entries).compute("all")
        self._check(partial(self.report.near, stated=BF16_LOGITS), "bf16.prefill_logits", logits)

    @property
    def _ids(self) -> list[int]:
        ids: list[int] = self.recorded.inputs[f"{self.name}.input_ids"].reshape(-1).tolist()
        return ids

    def _publish(self, capture: Capture) -> tuple[list[Medium], list[Contract]]:
        media = self.recorded.media(self.name)
        if not media:
            return [], []
        entries = self.halves.publish(self.recorded.inputs[f"{self.name}.pixel_values"], media, capture)
        if self.halves.config.image_token_id not in self._ids:
            # The reference's processor adds a blank image to a prompt without media; nothing of it is on the timeline.
            return [], []
        return media, entries

    def _steps(self) -> int:
        """Tokens of the recorded continuation."""
        wanted = self.recorded.expected.get(f"{self.name}.greedy.{RULE}.ids")
        return len(self.recorded.greedy(f"{self.name}.{RULE}") or []) if wanted is None else len(wanted)

    def _stream(self, ids: Sequence[int], media: Sequence[Medium], entries: Sequence[Contract]) -> Stream:
        tokens = sum(entry.tokens for entry in entries)
        stream = self.halves.stream(rows=len(ids) + self._steps(), vision_tokens=tokens)
        stream.append(ids, media, entries)
        return stream

    def _vision(self, capture: Capture, entries: Sequence[Contract]) -> None:
        close = self.report.close
        blocks = [f"block{i}" for i in range(self.halves.config.vision.depth)]
        for part in ("patch_embed", "pos_embed", *blocks, "merged"):
            self._check(close, f"vision.{part}", capture.joined(part))
        self._check(close, "cross_attention_states", capture.joined("states"))
        if not entries:
            return
        stored = torch.cat([self.halves.fetch(entry) for entry in entries], dim=3)
        for number, layer in enumerate(self.halves.config.text.cross_attention_layers):
            keys, values = stored[number]
            self._check(close, f"layer{layer}.k_pre_rope", keys)
            self._check(close, f"layer{layer}.v", values.transpose(0, 1).flatten(1))

    def _timeline(self, stream: Stream) -> None:
        equal, timeline = self.report.equal, stream.timeline
        counts = torch.from_numpy(timeline.visible())
        spans = torch.from_numpy(timeline.boundaries())
        self._check(equal, "text_position_ids", torch.from_numpy(timeline.positions()))
        self._check(equal, "vision_position_ids", stream.vision_positions())
        self._check(equal, "rope_delta", [timeline.rope_delta])
        self._check(equal, "visible_frame_counts", counts)
        self._check(equal, "frame_mask", torch.arange(len(timeline.units)).unsqueeze(0) >= counts.unsqueeze(1))
        self._check(equal, "row_visible", spans[:, 1] > spans[:, 0])

    def _layers(self, capture: Capture, sees: Tensor) -> None:
        out = None
        for i in range(self.halves.config.text.num_hidden_layers):
            # The reference lets a row that sees nothing attend to everything and forgets the result later.
            crossed = capture.joined(f"layer{i}.cross_attn_out")
            self._check(self.report.close, f"layer{i}.cross_attn_out", crossed, rows=sees)
            # A cross layer that was not called because no row sees anything passes on what it would have been given.
            made = capture.joined(f"layer{i}.out")
            out = out if made is None else made
            self._check(self.report.close, f"layer{i}.out", out)

    def _greedy(self, stream: Stream, logits: Tensor, media: Sequence[Medium], entries: Sequence[Contract]) -> None:
        """Continues from the prefill token by token, then computes prompt and continuation in one pass."""
        steps = self._steps()
        if not steps:
            return
        chosen, rows = [], [logits]
        for index in range(steps):
            chosen.append(draw(rows[-1], Drawing(), index=index))
            if index + 1 < steps:
                stream.append([chosen[-1]])
                rows.append(stream.compute("last")[0])
        self._check(self.report.equal, f"greedy.{RULE}.ids", chosen)
        listed = self.recorded.greedy(f"{self.name}.{RULE}")
        if listed is not None:
            self.report.equal(f"greedy_ids.{self.name}.{RULE}", chosen, listed)
        self._check(self.report.close, f"greedy.{RULE}.logits", torch.stack(rows))
        whole = self._stream(self._ids, media, entries)
        whole.append(chosen[:-1])
        self._check(self.report.close, f"greedy.{RULE}.logits", whole.compute("all")[-steps:])


@dataclass
class _Growing:
    """A recorded stream: text first, then a token per step, and segments with frames that arrive after some of them."""

    report: Report
    recorded: Recorded
    halves: Halves
    name: str

    def run(self) -> None:
        prefix = f"{self.name}.{RULE}"
        expected, inputs = self.recorded.expected, self.recorded.inputs
        listed = self.recorded.greedy(prefix)
        steps = len(expected[f"{prefix}.ids"]) if f"{prefix}.ids" in expected else len(listed or [])
        if not steps:
            return
        arrivals = {s: self._arrival(s) for s in range(steps) if f"{self.name}.step{s}.segment_ids" in inputs}
        init: list[int] = inputs[f"{self.name}.init_ids"].reshape(-1).tolist()
        total = len(init) + steps + sum(len(ids) for ids, _, _ in arrivals.values())
        vision_tokens = sum(entry.tokens for _, _, entries in arrivals.values() for entry in entries)
        stream = self.halves.stream(rows=total, vision_tokens=vision_tokens)
        offline = self.halves.stream(rows=total, vision_tokens=vision_tokens)
        for either in (stream, offline):
            either.append(init)
        chosen, logits, decided_at = [], [], []
        for step in range(steps):
            logits.append(stream.compute("last")[0])
            decided_at.append(len(stream.timeline) - 1)
            chosen.append(draw(logits[-1], Drawing(), index=step))
            for either in (stream, offline):
                either.append([chosen[-1]])
                if step in arrivals:
                    either.append(*arrivals[step])
        timeline = stream.timeline
        got: dict[str, Tensor] = {
            "ids": torch.tensor(chosen),
            "full_ids": torch.tensor(timeline.ids()),
            "text_position_ids": torch.from_numpy(timeline.positions()),
            "vision_position_ids": stream.vision_positions(),
            "visible_frame_counts": torch.from_numpy(timeline.visible()),
        }
        for tensor, value in got.items():
            if f"{prefix}.{tensor}" in expected:
                self.report.equal(f"{prefix}.{tensor}", value, expected[f"{prefix}.{tensor}"])
        if listed is not None:
            self.report.equal(f"greedy_ids.{prefix}", chosen, listed)
        if f"{prefix}.logits" not in expected:
            return
        self.report.close(f"{prefix}.logits", torch.stack(logits), expected[f"{prefix}.logits"])
        self.report.close(f"{prefix}.logits", offline.compute("all")[decided_at], expected[f"{prefix}.logits"])

    def _arrival(self, step: int) -> tuple[list[int], list[Medium], list[Contract]]:
        """What arrives after the token of a step: ids, media and their entries, published one arrival at a time."""
        name = f"{self.name}.step{step}"
        media = self.recorded.media(name)
        patches = self.recorded.inputs.get(f"{name}.pixel_values")
        entries = [] if patches is None or not media else self.halves.publish(patches, media)
        return self.recorded.inputs[f"{name}.segment_ids"].reshape(-1).tolist(), media, entries
