"""Weights arrive whole: a table says which tensors a checkpoint has and which parameter each fills.

A family writes its table as data. Loading fails with the full list of what is missing, half-filled, of another shape,
filled twice or left over. Nothing is skipped in silence but the names of a short written list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from chiasm.errors import CheckpointError
from chiasm.models.checkpoint import Tensors

HalfName = Literal["encoder", "decoder"]

IGNORED = (re.compile(r".*\brotary_emb\.inv_freq$"),)
"""Tensors that may be there and are not read: rotary frequencies follow from the configuration."""

_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor and the rows of the parameter it fills; `rows` None means all of it."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of one half, and the ways in which checkpoints store it: whole, or in parts.

    Attributes:
        projects: a decoder half that projects states has a parameter of this name too, and fills it likewise.
        order: which row of what is stored each row of the parameter is; None where they are in one order.
        tied: it may be stored in several of these ways at once, if all of them hold the same.
    """

    half: HalfName
    parameter: str
    ways: tuple[tuple[Part, ...], ...]
    projects: bool = False
    order: tuple[int, ...] | None = None
    tied: bool = False

    def also_under(self, prefixes: Mapping[str, str]) -> Weight:
        """The same, with every way found under other prefixes too: by how names begin, how they begin elsewhere."""

        def renamed(part: Part) -> Part:
            for prefix, other in prefixes.items():
                if part.name.startswith(prefix):
                    return replace(part, name=other + part.name.removeprefix(prefix))
            return part

        others = (tuple(renamed(part) for part in way) for way in self.ways)
        return replace(self, ways=(*self.ways, *(way for way in others if way not in self.ways)))


def whole(half: HalfName, parameter: str, name: str, *shape: int, projects: bool = False) -> Weight:
    """A parameter stored as one tensor."""
    return Weight(half, parameter, ((Part(name, shape),),), projects)


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Every tensor of a checkpoint, each in exactly one entry.

    Attributes:
        left: names that may be there and are not read: of what is cut off.
    """

    weights: tuple[Weight, ...]
    left: frozenset[str] = frozenset()

    def of(self, half: HalfName, *, projects: bool = False) -> Iterator[Weight]:
        """What a half fills; where it is a decoder's that projects states, what it has of the encoder's too."""
        return (w for w in self.weights if w.half == half or (projects and w.projects and half == "decoder"))

    def names(self, half: HalfName | None = None, *, projects: bool = False) -> set[str]:
        """All checkpoint names in any way of storing them, of one half or of both."""
        chosen = self.weights if half is None else self.of(half, projects=projects)
        return {part.name for weight in chosen for way in weight.ways for part in way}

    def can_project(self, tensors: Mapping[str, object]) -> bool:
        """Whether a decoder half that projects states could be filled from these."""
        return all(_way(weight, tensors)[1] is None for weight in self.weights if weight.projects)


def load_half(
    module: nn.Module,
    half: HalfName,
    table: WeightTable,
    tensors: Tensors,
    *,
    projects: bool = False,
    kept: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Fills every parameter of `module` from `tensors`, casting to the parameter's type.

    Args:
        projects: it is a decoder half that projects states.
        kept: by their names, what is filled in the place of parameters that are kept elsewhere.

    Raises CheckpointError listing every problem found; the module is then not to be used.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters()) | dict(kept)
    weights = list(table.of(half, projects=projects))
    declared = {weight.parameter for weight in weights}
    assert declared == set(parameters), f"table and module differ: {sorted(declared ^ set(parameters))}"
    problems = [
        f"{name} is not a tensor of this model"
        for name in sorted(set(tensors) - table.names() - table.left)
        if not any(pattern.fullmatch(name) for pattern in IGNORED)
    ]
    for weight in weights:
        way, problem = _way(weight, tensors)
        if problem:
            problems.append(problem)
            read = _begun(weight, tensors)
        else:
            read = [part for stored in (_complete(weight, tensors) if weight.tied else (way,)) for part in stored]
        for part in read:
            problems += _check(part, tensors)
    if problems:
        raise CheckpointError(tensors.where, problems)
    for weight in weights:
        way, _ = _way(weight, tensors)
        _fill(parameters[weight.parameter], way, tensors, weight.order)
        if weight.tied:
            problems += _differing(weight, tensors)
    if problems:
        raise CheckpointError(tensors.where, problems)


def _way(weight: Weight, tensors: Mapping[str, object]) -> tuple[Sequence[Part], str | None]:
    """The one way in which a weight is stored here, or what is wrong."""
    complete = _complete(weight, tensors)
    begun = [part.name for part in _begun(weight, tensors)]
    if complete and (weight.tied or (len(complete) == 1 and len(begun) == len(complete[0]))):
        return complete[0], None
    if complete:
        return (), f"{weight.ways[0][0].name} is there more than once: {', '.join(begun)}"
    if begun:
        fullest = max(weight.ways, key=lambda way: sum(part.name in tensors for part in way))
        missing = [part.name for part in fullest if part.name not in tensors]
        unused = [name for name in begun if name not in {part.name for part in fullest}]
        beside = f", {', '.join(unused)} unused" if unused else ""
        return (), f"{weight.ways[0][0].name} is half-filled: {', '.join(missing)} missing{beside}"
    return (), f"{weight.ways[0][0].name} is missing"


def _begun(weight: Weight, tensors: Mapping[str, object]) -> list[Part]:
    """What of a weight is there, in any of its ways."""
    return [part for way in weight.ways for part in way if part.name in tensors]


def _complete(weight: Weight, tensors: Mapping[str, object]) -> list[tuple[Part, ...]]:
    """The ways in which all of a weight is there."""
    return [way for way in weight.ways if all(part.name in tensors for part in way)]


def _differing(weight: Weight, tensors: Tensors) -> list[str]:
    """A problem for each further way of a tied weight that holds something else than the first."""
    first, *others = _complete(weight, tensors)
    names = [" and ".join(part.name for part in way) for way in (first, *others)]
    return [
        f"{names[0]} and {name} are tied, and differ"
        for way, name in zip(others, names[1:], strict=True)
        if any(not torch.equal(tensors[a.name], tensors[b.name]) for a, b in zip(first, way, strict=True))
    ]


def _check(part: Part, tensors: Tensors) -> list[str]:
    dtype, shape = tensors.describe(part.name)
    problems = []
    if dtype not in _FLOATS:
        problems.append(f"{part.name} is of type {dtype}: quantised checkpoints are not loaded")
    if shape != part.shape:
        problems.append(f"{part.name} has shape {list(shape)}, must have {list(part.shape)}")
    return problems


@torch.no_grad()
def _fill(parameter: Tensor, way: Sequence[Part], tensors: Tensors, order: tuple[int, ...] | None = None) -> None:
    for part in way:
        rows = parameter if part.rows is None else parameter[part.rows[0] : part.rows[1]]
        rows.copy_(tensors[part.name].reshape(rows.shape))
    if order is not None:
        parameter.copy_(parameter[list(order)])
