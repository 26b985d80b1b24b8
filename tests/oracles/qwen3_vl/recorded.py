"""The recording, read once, and what this house makes of its inputs: pictures opened as a request's are, frames as the
video's reader hands them on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from chiasm.media import image, raw
from chiasm.media.patches import normalise, to_patches
from chiasm.media.sample import SamplingOptions
from chiasm.media.types import Limits, Probed, RawFrame
from chiasm.models.family import MediumFacts
from chiasm.models.qwen3_vl.config import Config, read_config
from chiasm.models.qwen3_vl.processing import Qwen3VLProcessor
from tests.media.make import save
from tests.oracles.qwen3_vl import DATA

Case = Mapping[str, Any]


@cache
def fixtures() -> Mapping[str, Any]:
    """`fixtures.json`."""
    read: Mapping[str, Any] = json.loads((DATA / "fixtures.json").read_text(encoding="utf-8"))
    return read


@cache
def tensors() -> Mapping[str, Tensor]:
    """`fixtures.safetensors`."""
    return load_file(DATA / "fixtures.safetensors")


def cases(*needed: str) -> list[Any]:
    """The cases that have every one of these keys, and something under it."""
    return [case for case in fixtures()["cases"] if all(case.get(key) for key in needed)]


def config() -> Config:
    """That of the recorded checkpoint."""
    return read_config(json.loads((DATA / "config.json").read_text(encoding="utf-8")), "recorded")


def processor(images: Case | None = None, videos: Case | None = None) -> Qwen3VLProcessor:
    """The recorded one, with these settings in the place of its own.

    Args:
        images, videos: keys of the file of each kind.
    """
    files = {}
    for name, changed in (("preprocessor_config.json", images), ("video_preprocessor_config.json", videos)):
        files[name] = json.loads((DATA / name).read_text(encoding="utf-8")) | dict(changed or {})
    return Qwen3VLProcessor.read(config(), files, "recorded")


def of_case(case: Case) -> tuple[Qwen3VLProcessor, list[SamplingOptions]]:
    """The processor as a case sets it up, and the options of its videos as a request of this house says them."""
    asked = dict(case["videos_kwargs"])
    ours = {"max_frames": asked.pop("max_frames", None)}  # recorded: taken and left unread. Here a request's own binds.
    assert ours["max_frames"] is None or case["name"] == "clip30_max_frames_call"
    number, fps = asked.pop("num_frames", None), asked.pop("fps", None)
    listed = asked.pop("do_sample_frames", True) is False
    options = SamplingOptions(fps=fps, min_frames=number, max_frames=number, every_frame=listed)
    made = processor(case["images_kwargs"], {**case["video_processor_init"], **asked})
    return made, [options] * len(case["videos"])


def picture(case: Case, name: str) -> Tensor:
    """(1, 3, H, W) of an input of a case, through the readers that a request's media go through."""
    pixels = tensors()[f"inputs/{name}"].numpy()
    if case["image_input"] == "PIL image":
        data = save(Image.fromarray(pixels))
        rgb, _ = image.decode(data, "PNG", Limits())
    else:
        pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
        rgb = raw.to_rgb(RawFrame(pixels.tobytes(), *pixels.shape))
    return torch.from_numpy(np.ascontiguousarray(rgb)).permute(2, 0, 1).unsqueeze(0)


def clip(name: str) -> Tensor:
    """(T, 3, H, W) of a recorded clip."""
    return tensors()[f"inputs/{name}"].permute(0, 3, 1, 2).contiguous()


def still(height: int, width: int) -> MediumFacts:
    """What is known of an image."""
    return MediumFacts("image", height, width, 1, 0.0, SamplingOptions())


def video(
    frames: int, fps: float, options: SamplingOptions, *, height: int = 64, width: int = 64
) -> tuple[MediumFacts, tuple[float, ...]]:
    """What is known of a file of so many frames at a constant rate, and the times of its frames."""
    offsets = tuple(i / fps for i in range(frames))
    probed = Probed("video", height, width, offsets, frames / fps, "mov,mp4")
    return MediumFacts.of(probed, options), offsets


def units(frames_t3hw: Tensor, span: int) -> list[Tensor]:
    """(span, 3, H, W) of each unit: the last frame is repeated where the number is odd, and an image's is."""
    missing = -len(frames_t3hw) % span
    whole = torch.cat([frames_t3hw, frames_t3hw[-1:].expand(missing, -1, -1, -1)])
    return list(whole.split(span))


def rows(resized: Sequence[Tensor], config: Config) -> Tensor:
    """(patches, 1536) of resized media one after another, in the order of the recorded rows."""
    vision = config.vision
    return torch.cat(
        [
            to_patches(normalise(unit), vision.patch_size, vision.spatial_merge_size)
            for frames in resized
            for unit in units(frames, vision.temporal_patch_size)
        ]
    )
