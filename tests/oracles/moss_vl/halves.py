"""The road of every comparison: encoder half, sealed entries, store, decoder engine. There is no undivided model.

Knows how to lay a recorded prompt on a timeline; knows nothing of what is expected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.entry import Contract, open_entry, seal, tag_secret, unit_key
from chiasm.cache.form import Form
from chiasm.cache.memory import MemoryStore
from chiasm.cache.tenant import tenant_root
from chiasm.chat_template import Piece, Slot
from chiasm.models.entries import contract_of, identity_of
from chiasm.models.forms import CODECS
from chiasm.models.moss_vl.config import Config
from chiasm.models.moss_vl.processing import MossVLProcessor
from chiasm.models.moss_vl.text import MossVLDecoder
from chiasm.models.moss_vl.vision import MossVLEncoder
from chiasm.models.registry import Model
from chiasm.timeline import Timeline
from decoder_service.engine import DecoderEngine, Work
from decoder_service.laid import SizedSlot
from decoder_service.sequence import DecodeSequence

Medium = tuple[int, int, int]
"""A row of grid_thw: frames, patch rows, patch columns."""

_ROOT = tenant_root(bytes(32), "oracle")
_SECRET = tag_secret(bytes(32), _ROOT)


@dataclass
class Capture:
    """Outputs of named modules, gathered while it is open. `joined` puts several calls of one module together."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def joined(self, name: str) -> Tensor | None:
        found = self.parts.get(name)
        return torch.cat(found) if found else None

    @contextmanager
    def open(self, outputs: dict[str, nn.Module], inputs: dict[str, nn.Module] | None = None) -> Iterator[None]:
        def keep(name: str, tensor: Tensor) -> None:
            self.parts.setdefault(name, []).append(tensor.detach().clone())

        def after(name: str) -> Any:
            return lambda module, given, out: keep(name, out)

        def before(name: str) -> Any:
            return lambda module, given: keep(name, given[0])

        handles = [module.register_forward_hook(after(name)) for name, module in outputs.items()]
        handles += [module.register_forward_pre_hook(before(name)) for name, module in (inputs or {}).items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Halves:
    """Both halves of a checkpoint and the store between them.

    Args:
        encoder, decoder: folders; the same one, or one per half with equal fingerprints.
        form: of the entries between them.
    """

    def __init__(self, encoder: Path, decoder: Path, dtype: torch.dtype, *, form: Form = Form.CROSS_KV) -> None:
        ours, theirs = Model(encoder), Model(decoder)
        assert ours.checkpoint.fingerprint == theirs.checkpoint.fingerprint, "the halves are of different checkpoints"
        self.config = cast(Config, theirs.config)
        self.processor = cast(MossVLProcessor, theirs.processor)
        self.encoder = cast(MossVLEncoder, ours.encoder(dtype=dtype))
        self.decoder = cast(MossVLDecoder, theirs.decoder(dtype=dtype, projects=form is Form.STATES))
        self.form = form
        self.dtype = dtype
        fingerprint = ours.checkpoint.fingerprint
        self._identity = identity_of(ours.processor, fingerprint=fingerprint, dtype=dtype).digest()
        self._store = MemoryStore(2**32)

    @torch.inference_mode()
    def publish(self, patches_pv: Tensor, media: Sequence[Medium], capture: Capture | None = None) -> list[Contract]:
        """Encodes the frames of all media in one pass and puts an entry of each into the store.

        Args:
            patches_pv: normalised patches of all frames, one frame after another.
            capture: gets `patch_embed`, `pos_embed`, `block{i}`, `merged` and `states`.
        """
        grids = [(rows, columns) for frames, rows, columns in media for _ in range(frames)]
        visual = self.encoder.visual
        outputs: dict[str, nn.Module] = {f"block{i}": block for i, block in enumerate(visual.blocks)}
        outputs |= {"patch_embed": visual.patch_embed, "pos_embed": visual.pos_embed, "merged": self.encoder.merger}
        with (capture or Capture()).open(outputs, {"states": self.encoder.cross[0]}):
            entries = self.encoder.encode_patches(patches_pv, grids, TorchVarlen())
        if self.form is Form.STATES:
            tokens = [entry.shape[3] for entry in entries]
            entries = list(self.encoder.states(patches_pv, grids, TorchVarlen()).split(tokens))
        frames = patches_pv.split([rows * columns for rows, columns in grids])
        return [self._put(*parts) for parts in zip(frames, grids, entries, strict=True)]

    def _put(self, patches_pv: Tensor, grid: tuple[int, int], entry: Tensor) -> Contract:
        # Recorded media need not come from bytes, so the bits of the patches stand for the pixels in the key.
        bits = patches_pv.contiguous().view(torch.uint8).unsqueeze(0)
        key = unit_key(_ROOT, self._identity, grid, [bits], form=self.form, dtype=self.dtype)
        contract = contract_of(
            self.encoder.entry_shape,
            self.processor,
            key=key,
            identity=self._identity,
            dtype=self.dtype,
            grid=grid,
            form=self.form,
        )
        payload = CODECS[self.form].encode(entry).contiguous()
        asyncio.run(self._store.put(seal(contract, payload, _SECRET), key))
        return contract

    def fetch(self, contract: Contract) -> Tensor:
        """Keys and values of an entry as a decoder gets them: from the store, verified."""
        sealed = asyncio.run(self._store.get(contract.key))
        assert sealed is not None, "an entry is not in the store"
        opened = open_entry(sealed, contract, _SECRET)
        assert isinstance(opened, Tensor), f"an entry is not believed: {opened}"
        with torch.inference_mode():
            return CODECS[self.form].decode(opened, self.decoder, contract.tokens)

    def stream(self, *, rows: int, vision_tokens: int) -> Stream:
        """An empty timeline on an engine that holds no more than it needs."""
        engine = DecoderEngine(
            self.decoder, self.processor, text_tokens=rows, visual_tokens=max(vision_tokens, 1), page_size=8
        )
        # What is read before it is written must show.
        engine.pools.self_kv.fill_(torch.nan)
        engine.pools.cross_kv.fill_(torch.nan)
        return Stream(self, engine, engine.sequence())


@dataclass
class Stream:
    """One sequence on an engine of its own."""

    halves: Halves
    engine: DecoderEngine
    sequence: DecodeSequence
    _media: int = 0

    @property
    def timeline(self) -> Timeline:
        return self.sequence.timeline

    def append(self, ids: Sequence[int], media: Sequence[Medium] = (), entries: Sequence[Contract] = ()) -> None:
        """Lays ids with the media whose placeholders are among them, and attaches their entries from the store."""
        laid = len(self.timeline.units)
        if not media:  # a placeholder's id that was sampled stands for nothing
            self.sequence.extend([list(ids)])
            return
        pieces, sized = lay(ids, media, self.halves.config.image_token_id, self._media)
        self._media += len(media)
        for slot, units in sized.items():
            self.sequence.size(slot, units)
        self.sequence.extend(pieces)
        for unit, contract in zip(self.timeline.units[laid:], entries, strict=True):
            self.engine.attach(self.sequence, unit.name, self.halves.fetch(contract))

    def compute(self, logits: Literal["last", "all"], capture: Capture | None = None) -> Tensor:
        """One step over every row not yet computed. Returns (wanted rows, vocabulary) float32.

        `capture` gets `layer{i}.out` and `layer{i}.cross_attn_out`.
        """
        outputs: dict[str, nn.Module] = {}
        for i, layer in enumerate(self.halves.decoder.layers):
            outputs[f"layer{i}.out"] = layer
            if i in self.halves.config.text.cross_attention_layers:
                outputs[f"layer{i}.cross_attn_out"] = cast(nn.Module, layer.cross_attn)
        rows = self.sequence.ready_rows - self.sequence.computed
        with (capture or Capture()).open(outputs):
            return self.engine.step([Work(self.sequence, rows, logits)])[0]

    def vision_positions(self) -> Tensor:
        """(3, vision tokens) positions of every key attached."""
        parts = [torch.zeros(3, 0, dtype=torch.int64)]
        for unit in self.timeline.units:
            sized = self.sequence.sized(unit.name.slot)
            assert sized is not None
            steps = self.halves.processor.key_steps(sized.grids[unit.name.unit])
            parts.append(torch.from_numpy(steps + unit.start))
        return torch.cat(parts, dim=1)

    def attached_keys(self, layer: int) -> Tensor:
        """(kv heads, vision tokens, dim) rotated keys of a cross layer as they lie in the pool."""
        extents = self.sequence.rows(self.sequence.ready_rows - self.sequence.computed).extents
        pool = self.engine.pools.cross_kv[layer, 0]
        return torch.cat([pool[:, slot : slot + length] for _, slot, length in extents], dim=1)


def lay(
    ids: Sequence[int], media: Sequence[Medium], pad: int, first_slot: int
) -> tuple[list[Piece], dict[int, SizedSlot]]:
    """Recorded ids as pieces: a slot per medium, from its first placeholder to its last.

    Raises ValueError unless there is one placeholder per frame.
    """
    pads = [row for row, token in enumerate(ids) if token == pad]
    if len(pads) != sum(frames for frames, _, _ in media):
        raise ValueError(f"{sum(m[0] for m in media)} frames for {len(pads)} placeholders")
    pieces: list[Piece] = []
    sized: dict[int, SizedSlot] = {}
    at = seen = 0
    for number, (frames, rows, columns) in enumerate(media):
        own = pads[seen : seen + frames]
        seen += frames
        inner: list[list[int] | int] = []
        for unit, row in enumerate(own):
            if unit and own[unit - 1] + 1 < row:
                inner.append(list(ids[own[unit - 1] + 1 : row]))
            inner.append(unit)
        if at < own[0]:
            pieces.append(list(ids[at : own[0]]))
        pieces.append(Slot(first_slot + number))
        offsets = [float(unit) for unit in range(frames)]
        sized[first_slot + number] = SizedSlot(inner, [(rows, columns)] * frames, offsets, final=True)
        at = own[-1] + 1
    if at < len(ids):
        pieces.append(list(ids[at:]))
    return pieces, sized
