"""One medium on its way to the server in pieces: a header that describes it, then its bytes as they are read.

A file is never in memory as a whole, and of a list of pictures one at a time is. Knows no transport.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from typing import IO

from blake3 import blake3

from chiasm.client import pixels
from chiasm.client.checks import conflict
from chiasm.client.media import Frames, Handle, Image, Video
from chiasm.client.pixels import Raw
from chiasm.errors import InvalidRequest, ServerError
from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb

HANDLE_BYTES = 16


class Upload:
    """What is sent of one medium. The handle is drawn here, so that requests can name it while it is being sent.

    Args:
        item: the medium's place in the request that it is sent for.
        ttl: seconds that it is kept after its last use; None: as long as the server chooses.

    Attributes:
        header: what is told of it before its bytes; their count is added when they are opened.

    Raises InvalidRequest for a medium that cannot be sent as it is, OSError for a path that is not there.
    """

    def __init__(self, medium: Image | Video | Frames, *, item: str | None = None, ttl: float | None = None) -> None:
        self.item = item
        self.id = secrets.token_bytes(HANDLE_BYTES)
        self.header = pb.MediaHeader(kind=pb.MEDIA_KIND_IMAGE if isinstance(medium, Image) else pb.MEDIA_KIND_VIDEO)
        self._ttl = ttl
        self._pictures: tuple[Image | Video, ...] = medium.pictures if isinstance(medium, Frames) else (medium,)
        if isinstance(medium, Frames):
            self.header.frames.CopyFrom(frame_list(medium))
        elif isinstance(medium, Image) and (shape := pixels.shape_of(medium.source, medium.layout)) is not None:
            self.header.frames.frames.add(raw=raw_layout(shape))
        else:
            pixels.check_bytes(pixels.size_of(medium.source))
        self._digest = blake3()

    @classmethod
    def alone(cls, medium: Image | Video | Frames, ttl: float | None = None) -> Upload:
        """A medium that is sent for no request yet.

        Raises as the constructor, and SAMPLING_CONFLICT for a Video with options: they belong to the questions. Raises
        TypeError for a handle, and for what is no medium.
        """
        if not isinstance(medium, Image | Video | Frames):
            raise TypeError(f"an upload takes Image(...), Video(...) or Frames(...), not {type(medium).__name__}")
        if not isinstance(medium, Frames) and isinstance(medium.source, Handle):
            raise TypeError("a handle was uploaded already")
        if isinstance(medium, Video) and medium.chooses:
            raise conflict("how to choose frames is said with each question: Video(handle, fps=2)")
        return cls(medium, ttl=ttl)

    @property
    def handle(self) -> str:
        return self.id.hex()

    async def requests(self) -> AsyncIterator[rpb.UploadRequest]:
        """The messages of the upload. Bytes are read beside the event loop.

        Raises OSError for what cannot be read, InvalidRequest for what turns out to be no medium.
        """
        self._digest = blake3()
        beginning = rpb.UploadHeader(upload_id=self.id, media=self.header)
        if self._ttl is not None:
            beginning.ttl.CopyFrom(to_duration(self._ttl))
        last_frame = len(self._pictures) - 1
        for frame, picture in enumerate(self._pictures):
            file, known = await asyncio.to_thread(_opened, picture)
            with file:
                size = await asyncio.to_thread(_size, file)
                if frame == 0:
                    if not self.header.HasField("frames"):  # of a list the bytes are counted as they come
                        beginning.media.byte_length = size
                        if known:
                            beginning.digest = await asyncio.to_thread(_digest, file)
                    yield rpb.UploadRequest(header=beginning)
                sent = 0
                while sent < size:
                    data = await asyncio.to_thread(file.read, min(CHUNK_BYTES, size - sent))
                    if not data:
                        raise _changed(size, sent)
                    sent += len(data)
                    self._digest.update(data)
                    ends = sent == size
                    last = ends and frame == last_frame
                    yield rpb.UploadRequest(chunk=pb.MediaChunk(frame=frame, data=data, last=last, ends_frame=ends))

    def check(self, response: rpb.UploadResponse) -> None:
        """Raises ServerError DATA_LOSS if the server has other bytes than were sent."""
        if response.handle != self.handle or response.digest != self._digest.digest():
            raise ServerError("DATA_LOSS", "the server holds other bytes than were sent", code="DATA_LOSS")


def _opened(picture: Image | Video) -> tuple[IO[bytes], bool]:
    """The bytes of a picture or file to be read, and whether they lie in memory."""
    assert not isinstance(picture.source, Handle), "a handle is not uploaded again"
    if isinstance(picture.source, os.PathLike):
        return open(picture.source, "rb"), False
    data = pixels.encoded(picture.source, picture.layout if isinstance(picture, Image) else None, limit=None)
    return BytesIO(data.data if isinstance(data, Raw) else data), True


def _size(file: IO[bytes]) -> int:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    pixels.check_bytes(size)
    return size


def _digest(file: IO[bytes]) -> bytes:
    """BLAKE3 of a file in memory, which costs less than sending bytes that the server would refuse."""
    digest = blake3()
    for piece in _pieces(file):
        digest.update(piece)
    file.seek(0)
    return digest.digest()


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(CHUNK_BYTES):
        yield piece


def frame_list(medium: Frames) -> pb.FrameList:
    """What is said of a list of pictures before their bytes.

    Raises InvalidRequest FRAME_LAYOUT for arrays of different sizes.
    """
    described = pb.FrameList(fps=medium.fps)
    first: tuple[int, int, int] | None = None
    for i, image in enumerate(medium.pictures):
        header = described.frames.add()
        shape = pixels.shape_of(image.source, image.layout)
        if shape is not None:
            first = first or shape
            _check_same_size(i, first, shape)
            header.raw.CopyFrom(raw_layout(shape))
        if medium.timestamps is not None:
            header.frame_offset.CopyFrom(to_duration(medium.timestamps[i]))
    return described


def raw_layout(shape: tuple[int, int, int]) -> pb.RawLayout:
    """Of pixels of shape (height, width, channels)."""
    height, width, channels = shape
    return pb.RawLayout(size=pb.Size(height=height, width=width), channels=channels)


def _check_same_size(index: int, first: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    if shape[:2] != first[:2]:
        raise InvalidRequest(
            "FRAME_LAYOUT",
            f"frame {index} is {shape[1]} x {shape[0]} pixels, the first is {first[1]} x {first[0]}",
            facts={"index": index, "height": shape[0], "width": shape[1]},
        )


def _changed(size: int, sent: int) -> InvalidRequest:
    return InvalidRequest(
        "UPLOAD_PROTOCOL",
        f"the file had {size} bytes when it was opened and ended after {sent}",
        facts={"cause": "length", "promised": size, "came": sent},
    )
