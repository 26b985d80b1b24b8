"""Parts and weights that are found at once are the same ones, and still a module's."""

from __future__ import annotations

import torch
from torch import nn

from chiasm.layers.lookup import shorten


def test_a_shortened_module_computes_the_same_and_sees_what_its_weights_come_to_hold() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))
    x = torch.ones(1, 3)
    before = module(x)
    shorten(module)
    first = module.get_submodule("0")
    assert first.__dict__["weight"] is first.weight is dict(module.named_parameters())["0.weight"]
    assert torch.equal(module(x), before)
    with torch.no_grad():
        first.get_parameter("weight").zero_()
        first.get_parameter("bias").zero_()
    assert torch.equal(module(x), module.get_submodule("1")(torch.zeros(1, 4)))
    assert len(module.state_dict()) == 4
