"""Finds the family folders, opens a checkpoint with the one that claims it, and makes its halves.

A new family is a new folder beside this file; nothing here knows one by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import chiasm.models
from chiasm.errors import CheckpointError
from chiasm.models.checkpoint import Checkpoint
from chiasm.models.family import DecoderHalf, EncoderHalf, Family, Processor, Prompt
from chiasm.models.weights import HalfName, load_half
from chiasm.tokenizer import Tokenizer

H = TypeVar("H")

SHIPPED = Path(chiasm.models.__file__).parent.parent / "checkpoints"
"""Checkpoints that come with the package, by folder name."""


@cache
def families() -> Mapping[str, Family[Any]]:
    """Every family, by its name."""
    folders = (m.name for m in pkgutil.iter_modules(chiasm.models.__path__) if m.ispkg)
    found = [importlib.import_module(f"chiasm.models.{folder}").FAMILY for folder in folders]
    return {family.name: family for family in found}


def find(model: str, *, download: bool = False) -> Path:
    """The folder of a checkpoint: a path, the name of a shipped one, or (with `download`) a hub name.

    Raises CheckpointError if it is none of them, and if the hub has no such checkpoint or cannot be reached.
    """
    path = Path(model)
    try:
        if path.is_dir():
            return path
        if "/" not in model and (SHIPPED / model / "config.json").exists():
            return SHIPPED / model
    except OSError as error:  # too long for a path, or a folder that may not be looked into
        raise CheckpointError(model, [f"cannot be looked up ({type(error).__name__})"]) from None
    if not download:
        raise CheckpointError(model, ["is neither a folder nor a checkpoint that comes with the package"])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except Exception as error:  # the hub's, its HTTP library's, the disk's: families without a common class
        raise CheckpointError(model, [f"cannot be fetched from the hub ({type(error).__name__})"]) from None


class Model:
    """A checkpoint together with its family: what both services, the router and the tests open.

    Raises CheckpointError for a folder that is none, an architecture no family claims, or a configuration it refuses.
    """

    def __init__(self, directory: Path) -> None:
        self.checkpoint = Checkpoint(directory)
        self.name = directory.name
        architecture = self.checkpoint.architecture
        claims = [family for family in families().values() if architecture in family.architectures]
        if not claims:
            known = sorted(a for family in families().values() for a in family.architectures)
            raise CheckpointError(self.name, [f"architecture {architecture} is not known, only {', '.join(known)}"])
        self.family = claims[0]
        self.config = self.family.read_config(self.checkpoint.config, self.name)
        self.weights = self.family.weights(self.config)
        self.processor: Processor = self.family.processor(self.config, self.checkpoint.processor_files, self.name)

    def prompt(self) -> Prompt:
        """Tokenizer and template. Raises CheckpointError if the folder has no tokenizer.json."""
        if self.checkpoint.tokenizer_file is None:
            raise CheckpointError(self.name, ["tokenizer.json is missing"])
        tokenizer = Tokenizer.from_file(self.checkpoint.tokenizer_file)
        return self.family.prompt(self.config, tokenizer, self.checkpoint.chat_template)

    def encoder(self, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> EncoderHalf:
        """The encoder half, filled, without gradients; in the checkpoint's own type unless another is asked for."""
        return self._half("encoder", self.family.encoder, torch.device(device), dtype)

    def decoder(self, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> DecoderHalf:
        """The decoder half, likewise."""
        return self._half("decoder", self.family.decoder, torch.device(device), dtype)

    def _half(self, name: HalfName, make: Callable[..., H], device: torch.device, dtype: torch.dtype | None) -> H:
        with _SkipInit():
            half = make(self.config, device=device, dtype=dtype or self.checkpoint.dtype)
        module = cast(nn.Module, half)
        load_half(module, name, self.weights, self.checkpoint.tensors)
        module.requires_grad_(False)
        return half


class _SkipInit(TorchFunctionMode):
    """Leaves parameters unset where a constructor would draw random numbers that loading overwrites."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return func(*args, **(kwargs or {}))
