"""Finds the family folders, opens a checkpoint with the one that claims it, and makes its halves.

A new family is a new folder beside this file; nothing here knows one by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import blake3
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import chiasm.models
from chiasm.errors import CheckpointError
from chiasm.layers.lookup import shorten
from chiasm.models.checkpoint import Checkpoint
from chiasm.models.family import CutFamily, DecoderHalf, EncoderHalf, EntryShape, Family, Processor, Prompt
from chiasm.models.finding import SHIPPED, find, name_of
from chiasm.models.residence import streamed
from chiasm.models.streaming import Streaming
from chiasm.models.weights import HalfName, load_half
from chiasm.tokenizer import Tokenizer

__all__ = ["SHIPPED", "Model", "families", "find", "open_model"]

H = TypeVar("H")


@cache
def families() -> Mapping[str, Family[Any]]:
    """Every family, by its name."""
    folders = (m.name for m in pkgutil.iter_modules(chiasm.models.__path__) if m.ispkg)
    found = [importlib.import_module(f"chiasm.models.{folder}").FAMILY for folder in folders]
    return {family.name: family for family in found}


class Model:
    """A checkpoint together with its family: what both services, the router and the tests open.

    Args:
        directory: the folder.
        name: what requests call the model; None takes the name of the folder.
        condition_layers: its decoder is cut after so many layers. None for the whole.

    Raises CheckpointError for a folder that is none, an architecture no family claims or none cuts, a configuration it
    refuses, or a layer that is not there.
    """

    def __init__(self, directory: Path, name: str | None = None, *, condition_layers: int | None = None) -> None:
        self.checkpoint = Checkpoint(directory)
        self.name = directory.resolve().name if name is None else name
        architecture = self.checkpoint.architecture
        claims = [family for family in families().values() if architecture in family.architectures]
        if not claims:
            reasons = [family.refused[architecture] for family in families().values() if architecture in family.refused]
            if reasons:
                raise CheckpointError(self.name, [f"architecture {architecture} is not supported: {reasons[0]}"])
            known = sorted(a for family in families().values() for a in family.architectures)
            raise CheckpointError(self.name, [f"architecture {architecture} is not known, only {', '.join(known)}"])
        self.condition_layers = condition_layers
        self.family: Family[Any] = claims[0]
        if condition_layers is None:
            self.config = self.family.read_config(self.checkpoint.config, self.name)
        else:
            cutting = _cutting(self.family, self.name)
            self.family = cutting
            self.config = cutting.read_cut(self.checkpoint.config, self.name, condition_layers)
        self.weights = self.family.weights(self.config)
        self.processor: Processor = self.family.processor(self.config, self.checkpoint.processor_files, self.name)

    def prompt(self) -> Prompt:
        """Tokenizer and template. Raises CheckpointError if the folder has no tokenizer.json."""
        if self.checkpoint.tokenizer_file is None:
            raise CheckpointError(self.name, ["tokenizer.json is missing"])
        tokenizer = Tokenizer.from_file(self.checkpoint.tokenizer_file)
        return self.family.prompt(self.config, tokenizer, self.checkpoint.chat_template)

    def encoder(
        self,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        streaming: Streaming | None = None,
    ) -> EncoderHalf:
        """The encoder half, filled, without gradients; in the checkpoint's own type unless another is asked for.

        Args:
            streaming: how its blocks come to the device one by one; None for all of them to be there.

        Raises SettingsError if the host has no room for streamed blocks.
        """
        return self._half("encoder", self.family.encoder, torch.device(device), dtype, streaming)

    def decoder(
        self,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        projects: bool = False,
        streaming: Streaming | None = None,
    ) -> DecoderHalf:
        """The decoder half, likewise; `projects`: one that makes keys and values of states."""
        make = partial(self.family.decoder, projects=projects)
        return self._half("decoder", make, torch.device(device), dtype, streaming, projects=projects)

    @property
    def text_fingerprint(self) -> bytes:
        """`Checkpoint.text_fingerprint`; of a cut one with where it is cut, for it tells less than the whole."""
        whole = self.checkpoint.text_fingerprint
        if self.condition_layers is None:
            return whole
        return blake3.blake3(b"chiasm cut v1\0" + whole + self.condition_layers.to_bytes(4, "little")).digest()

    @property
    def entry_shape(self) -> EntryShape:
        """What its entries look like."""
        return self.family.entry_shape(self.config)

    @property
    def can_project(self) -> bool:
        """Whether the folder holds what a decoder half needs to project states: one cut from a whole may not."""
        return self.weights.can_project(self.checkpoint.tensors)

    def _half(
        self,
        name: HalfName,
        make: Callable[..., H],
        device: torch.device,
        dtype: torch.dtype | None,
        streaming: Streaming | None,
        *,
        projects: bool = False,
    ) -> H:
        with _SkipInit(allocate=streaming is None):
            half = make(self.config, device=device, dtype=dtype or self.checkpoint.dtype)
        module = cast(nn.Module, half)
        module.requires_grad_(False)
        residence = None if streaming is None else streamed(module, device, streaming)
        kept = {} if residence is None else residence.kept
        load_half(module, name, self.weights, self.checkpoint.tensors, projects=projects, kept=kept)
        shorten(module)
        if residence is not None:
            residence.begin()
        return half


def open_model(model: str, *, condition_layers: int | None = None) -> Model:
    """The model of a folder, of a name that comes with the package, or of a hub name, which is fetched.

    Args:
        condition_layers: as `Model` has it.

    Raises CheckpointError.
    """
    folder = find(model, download=True)
    return Model(folder, name_of(model, folder), condition_layers=condition_layers)


def _cutting(whole: Family[Any], where: str) -> CutFamily[Any]:
    """The family that a model of `whole` is when its decoder is cut."""
    for family in families().values():
        if isinstance(family, CutFamily) and family.cuts == whole.name:
            return family
    raise CheckpointError(where, [f"is of {whole.name}, whose decoder is not cut after a layer"])


class _SkipInit(TorchFunctionMode):
    """Leaves parameters unset where a constructor would draw random numbers that loading overwrites.

    Args:
        allocate: their memory is taken. Otherwise they are on `meta`: how large they are and how they lie is known.
    """

    def __init__(self, *, allocate: bool) -> None:
        super().__init__()
        self._allocate = allocate

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if func is torch.empty and not self._allocate:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)
