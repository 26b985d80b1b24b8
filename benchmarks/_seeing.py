"""A random model with eyes of some size, clips for it, and questions of as many tokens as one likes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from chiasm.local import LocalService
from chiasm.models.finding import SHIPPED
from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests import checkpoints_tiny
from tests.media import make
from tools.train_digits import held_out

SIDE: Final = 448

VISION: Final = {
    "depth": 8,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "num_position_embeddings": 784,
    "deepstack_visual_indexes": [],
}
"""784 patches and 197 visual tokens to a frame of 448 × 448."""


class Asked(NamedTuple):
    """One answer: seconds to its first token, and what its usage says."""

    seconds: float
    usage: pb.Usage


def checkpoint(folder: Path, text: Mapping[str, Any]) -> Path:
    """A random model with these eyes, that text half and the shipped tokenizer."""
    digits = SHIPPED / "digits"
    shipped = json.loads((digits / "config.json").read_text())
    ids = {name: value for name, value in shipped.items() if name.endswith("_token_id")}
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    made = checkpoints_tiny.write(folder / "random", checkpoints_tiny.config(text, vision, **ids))
    shutil.copy(digits / "tokenizer.json", made)
    return made


def frames(count: int, seed: int) -> list[npt.NDArray[np.uint8]]:
    """Different pictures of (448, 448, 3), smooth as pictures are."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (count, 14, 14, 3), np.uint8)
    return [np.ascontiguousarray(picture.repeat(32, 0).repeat(32, 1)) for picture in coarse]


def clip(count: int, seed: int) -> bytes:
    """An H.264 mp4 of a frame a second."""
    return held_out.mp4(frames(count, seed))


def lossless(pictures: Sequence[npt.NDArray[np.uint8]]) -> bytes:
    """An H.264 mp4 of a frame a second, in which a picture decodes to the same pixels whatever is beside it."""
    return make.video(pictures, codec="libx264", time_base=Fraction(1), options={"qp": "0"})


async def upload(service: LocalService, data: bytes, name: int) -> pb.Media:
    """The handle of a clip, as a medium of a request."""
    upload_id = name.to_bytes(16, "big")

    async def requests() -> AsyncIterator[rpb.UploadRequest]:
        header = rpb.UploadHeader(upload_id=upload_id, media=pb.MediaHeader(kind=pb.MEDIA_KIND_VIDEO))
        yield rpb.UploadRequest(header=header)
        for at in range(0, len(data), CHUNK_BYTES):
            piece = data[at : at + CHUNK_BYTES]
            yield rpb.UploadRequest(chunk=pb.MediaChunk(data=piece, last=at + len(piece) == len(data)))

    return pb.Media(kind=pb.MEDIA_KIND_VIDEO, handle=(await service.upload(requests())).handle)


def text(service: LocalService, tokens: int, seed: int) -> str:
    """Letters that are so many tokens, and others for every seed."""
    rng = np.random.default_rng(seed)
    letters = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), 8 * tokens))
    count = next(i for i in range(len(letters)) if len(service.decoder.prompt.text(letters[:i])) == tokens)
    return letters[:count]


async def ask(service: LocalService, parts: Sequence[str | pb.Media]) -> Asked:
    """One token for one user turn."""
    request = rpb.GenerateRequest(model=service.name)
    turn = request.prompt.conversation.turns.add(role=pb.ROLE_USER)
    for part in parts:
        if isinstance(part, str):
            turn.parts.add(text=part)
        else:
            turn.parts.add(slot=len(request.media))
            request.media.append(part)
    request.sampling.max_tokens = 1
    first = None
    began = time.perf_counter()
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            if event.HasField("tokens") and first is None:
                first = time.perf_counter() - began
            if event.HasField("finished"):
                assert first is not None, "an answer has a token"
                return Asked(first, event.finished.usage)
    raise AssertionError("an answer ends")
