"""The answer of a stream, gathered from its events. Knows no call."""

from __future__ import annotations

from chiasm.client.events import (
    Event,
    Finished,
    FinishReason,
    Generation,
    StageTimes,
    Started,
    TimelineFrame,
    Token,
    Usage,
)


class Answer:
    """What has come so far. All of it is there when the stream has ended.

    Attributes:
        text, ids: of the tokens so far.
        frames: every frame of the timeline, from the `Started` event on.
        finish_reason, usage, times: None until the answer is finished.
        request_id: names the request in errors and in the server's logs.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ids: tuple[int, ...] = ()
        self.frames: tuple[TimelineFrame, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.times: StageTimes | None = None
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, event: Event) -> None:
        if isinstance(event, Token):
            self._pieces.append(event.text)
            self.ids += event.ids
        elif isinstance(event, Started):
            self.frames = event.frames
        elif isinstance(event, Finished):
            self.finish_reason, self.usage, self.times = event.reason, event.usage, event.times

    def whole(self) -> Generation:
        """The answer as one value. Raises RuntimeError before its end."""
        if self.finish_reason is None or self.usage is None or self.times is None:
            raise RuntimeError("the answer is not finished")
        return Generation(self.text, self.ids, self.finish_reason, self.usage, self.times, self.frames, self.request_id)
