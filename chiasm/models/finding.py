"""Where a checkpoint lies: a folder, one that comes with the package, or one that is fetched from the hub.

Knows names and folders. What is in a folder is read by `chiasm.models.checkpoint`; nothing here loads torch.
"""

from __future__ import annotations

import re
from pathlib import Path

import chiasm.models
from chiasm.errors import CheckpointError

SHIPPED = Path(chiasm.models.__file__).parent.parent / "checkpoints"
"""Checkpoints that come with the package, by folder name."""

_HUB_NAME = re.compile(r"(?!\.+/)[\w.-]+/[\w.-]+")
"""`owner/name`. `./name` and `../name` are paths."""

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


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
        fetch = download and is_hub_name(model)
    except OSError as error:  # too long for a path, or a folder that may not be looked into
        raise CheckpointError(model, [f"cannot be looked up ({type(error).__name__})"]) from None
    if not fetch:
        raise CheckpointError(model, ["is neither a folder nor a checkpoint that comes with the package"])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except Exception as error:  # the hub's, its HTTP library's, the disk's: families without a common class
        problem = f"is no folder here, and the hub has no such checkpoint or cannot be reached ({type(error).__name__})"
        raise CheckpointError(model, [problem]) from None


def name_of(model: str, folder: Path) -> str:
    """What the model is called that `find(model)` found in `folder`: the folder's name, or the hub name: there the
    folder is named after a commit."""
    return model if is_hub_name(model) else folder.resolve().name


def is_hub_name(model: str) -> bool:
    """Whether it has the form `owner/name` and no file or folder of that path exists."""
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists()
