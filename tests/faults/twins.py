"""Checkpoints that differ from the shipped one in what a hurried upgrade may change, and in nothing that shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from chiasm.models.finding import SHIPPED


def other_weights(folder: Path) -> Path:
    """One number of the vision tower is another."""
    made = _copy(folder)
    tensors = load_file(made / "model.safetensors")
    name = next(name for name in sorted(tensors) if "visual" in name and tensors[name].is_floating_point())
    tensors[name].view(-1)[0] += torch.tensor(0.25, dtype=tensors[name].dtype)
    save_file(tensors, made / "model.safetensors")
    return made


def other_config(folder: Path) -> Path:
    """One word of the configuration is another, of which no weight knows anything."""
    made = _copy(folder)
    config = json.loads((made / "config.json").read_text())
    config["text_config"]["rope_theta"] = config["text_config"]["rope_theta"] * 2
    (made / "config.json").write_text(json.dumps(config))
    return made


def _copy(folder: Path) -> Path:
    made = folder / "twin"
    shutil.copytree(SHIPPED / "digits", made)
    return made
