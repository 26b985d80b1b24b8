"""A compiled decoder half: one graph for each kind of step, and the logits and pools of one that is not compiled.

The compiler's front traces here, and what it traces is run as it is: what its back makes of that takes minutes on a CPU
and is asked on a CUDA device (`tests/gpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from chiasm.attention.choose import AttentionName, make
from chiasm.attention.pages import Pools
from chiasm.models.family import DecoderHalf
from chiasm.models.registry import Model
from decoder_service.compiled import Compiled
from decoder_service.engine import DecoderEngine, Work
from decoder_service.forward import EagerForward
from tests import checkpoints_qwen3_vl, checkpoints_tiny
from tests.decoder_service.growing import assert_close, kept, laid

LAYERS = {"num_hidden_layers": 2, "cross_attention_layers": [1]}
"""One of each: tracing takes its time for every one."""


class Traced:
    """`MakeForward` of compiled steps.

    Attributes:
        graphs: that were traced.
    """

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(
        self,
        half: DecoderHalf,
        pools: Pools,
        attention: AttentionName,
        *,
        graph_rows: int,
        compiled: bool,
        deterministic: bool,
    ) -> EagerForward:
        def keep(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            assert all(x.numel() for x in inputs if isinstance(x, Tensor)), "what nobody reads would be left out"
            self.graphs.append(graph)
            return graph.forward

        compute = Compiled(half, backend=keep)
        return EagerForward(half, make(attention, pools, heads=half.heads), pools.features, compute=compute)


FEW = {"num_hidden_layers": 2}, {"deepstack_visual_indexes": [1]}
"""One that a tap is added behind, and one more."""


@pytest.mark.parametrize("overlaid", [False, True], ids=["apart", "overlaid"])
def test_steps_of_every_kind_give_the_logits_and_pools_of_eager_ones(tmp_path: Path, overlaid: bool) -> None:
    if overlaid:
        folder = checkpoints_qwen3_vl.write(tmp_path / "tiny", checkpoints_qwen3_vl.config(*FEW))
    else:
        folder = checkpoints_tiny.write(tmp_path / "tiny", checkpoints_tiny.config(LAYERS))
    model = Model(folder)
    traced = Traced()
    half = model.decoder(dtype=torch.float64)
    eager = DecoderEngine(half, model.processor, text_tokens=240, visual_tokens=200, page_size=4)
    other = DecoderEngine(half, model.processor, text_tokens=240, visual_tokens=200, page_size=4, forward=traced)
    for frames in (0, 2):
        text, seeing = ([laid(engine, seed, text=20, frames=frames) for engine in (eager, other)] for seed in (1, 2))
        for rows, wanted in ((4, "none"), (5, "last"), (3, "all"), (1, "none"), (1, "last")):
            steps = [
                engine.step([Work(one, rows, wanted), Work(two, 1, wanted)])  # type: ignore[arg-type]
                for engine, one, two in zip((eager, other), text, seeing, strict=True)
            ]
            for expected, got in zip(*steps, strict=True):
                assert_close(got, expected)
        for sequence, compiled in (text, seeing):
            assert_close(kept(other, compiled), kept(eager, sequence))
        states = [
            engine.step([Work(one, 1, "last", states=True), Work(two, 1, "last")])
            for engine, one, two in zip((eager, other), text, seeing, strict=True)
        ]
        for expected, got in zip(*states, strict=True):
            assert_close(got, expected)
        alone = [engine.step([Work(one, 1, "last")])[0] for engine, one in zip((eager, other), text, strict=True)]
        assert_close(alone[1], alone[0])
    crossing = [sum("attend_cross" in str(node.target) for node in graph.graph.nodes) for graph in traced.graphs]
    assert set(crossing) == {0, half.entry_shape.layers}, "a step is one graph, with the cross layers or without"
    assert len(crossing) <= 8, "shapes are free"
