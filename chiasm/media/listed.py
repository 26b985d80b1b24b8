"""A list of frames, encoded or raw, opened one by one in the order in which they come.

Count and times are known before any frame is, the size with the first. What the others are is found out as they come:
nothing is said of a frame because of a later one, so it makes no difference when the bytes of each came. The first
frame at fault is the list's fault, and is named. Parsing is the sandbox's; this module knows no bytes on their way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from chiasm.errors import InvalidRequest
from chiasm.media import raw
from chiasm.media.open import check_bytes, check_list, check_raw, check_same_size
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, Kind, MediaSource, Probed, RawFrame


class Listed:
    """One list on its way through the sandbox.

    Args:
        count: frames that are listed.
        offsets: seconds of each; None for an image, which is a list of one.

    Raises InvalidRequest as `chiasm.media.open.check_list`, and so does whatever opens its frames, with the number of
    the frame at fault in the facts.
    """

    def __init__(
        self, sandbox: Sandbox, kind: Kind, count: int, offsets: Sequence[float] | None, *, item: str | None = None
    ) -> None:
        self._sandbox = sandbox
        self._kind = kind
        self._count = count
        self._item = item
        with self._blamed():
            check_list(kind, count, offsets, sandbox.limits)
        self._offsets = tuple(float(offset) for offset in offsets or ()) if kind == "video" else (0.0,)
        self._size: tuple[int, int] | None = None
        self._found: set[str] = set()
        self._flags: set[str] = set()
        self._opened = 0
        self._bytes = 0
        self._seconds = 0.0

    async def probe(self, first: bytes | RawFrame) -> Probed:
        """What the list is, by its header and its first frame, which is opened later like the others."""
        with self._blamed(0):
            if isinstance(first, RawFrame):
                check_raw(first, self._sandbox.limits)
                self._note((first.height, first.width), "raw")
            else:
                one = await self._sandbox.probe(MediaSource("image", first), item=self._item)
                self._note((one.height, one.width), one.found, one.flags)
        return self.probed

    async def open(self, frame: bytes | RawFrame) -> Frame:
        """The next frame of the list."""
        index = self._opened
        assert index < self._count, f"frame {index} of {self._count}"
        limits = self._sandbox.limits
        self._bytes += len(frame.data if isinstance(frame, RawFrame) else frame)
        if self._bytes > limits.max_bytes:
            with self._blamed():
                check_bytes(self._bytes, limits)
        with self._blamed(index):
            if isinstance(frame, RawFrame):
                check_raw(frame, limits)
                size = (frame.height, frame.width)
                check_same_size(index, self._size or size, size)
                rgb = await asyncio.to_thread(raw.to_rgb, frame)
                self._note(size, "raw")
            else:
                one = await self._sandbox.picture(
                    frame, index=index, first=self._size, spent=self._seconds, item=self._item
                )
                rgb = one.rgb
                self._seconds += one.seconds
                self._note((rgb.shape[0], rgb.shape[1]), one.found, one.flags)
        self._opened += 1
        return Frame(index, self._offsets[index], rgb)

    @property
    def probed(self) -> Probed:
        """What is known by now. Formats and flags are those of the frames that were opened."""
        assert self._size is not None, "the first frame says the size"
        offsets = self._offsets
        tail = offsets[-1] - offsets[-2] if len(offsets) > 1 else 0.0
        return Probed(
            self._kind,
            *self._size,
            offsets,
            offsets[-1] - offsets[0] + tail,
            ",".join(sorted(self._found)),
            self._kind == "video",
            self._count,
            tuple(sorted(self._flags)),
        )

    @property
    def decoded(self) -> Decoded:
        """How it ended, once the last frame was opened."""
        assert self._opened == self._count, f"{self._opened} of {self._count} frames were opened"
        return Decoded(self._count, truncated=False)

    def _note(self, size: tuple[int, int], found: str, flags: Sequence[str] = ()) -> None:
        self._size = size
        self._found.add(found)
        self._flags.update(flags)

    @contextmanager
    def _blamed(self, index: int | None = None) -> Iterator[None]:
        try:
            yield
        except InvalidRequest as error:
            if index is not None:
                error.facts.setdefault("index", index)
            raise error if self._item is None else error.at(self._item) from error.__cause__
