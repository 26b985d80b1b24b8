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
    TokenLogprobs,
    Usage,
)


class Answer:
    """What has come so far. All of it is there when the stream has ended.

    Attributes:
        text, ids, logprobs: of the tokens so far.
        frames: every frame of the timeline, from the `Started` event on.
        finish_reason, usage, times: None until the answer is finished.
        stop: the stop string that ended it; None before its end, and where none did.
        request_id: names the request in errors and in the server's logs.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.frames: tuple[TimelineFrame, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.times: StageTimes | None = None
        self.stop: str | None = None
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, event: Event) -> None:
        if isinstance(event, Token):
            self._pieces.append(event.text)
            self.ids += event.ids
            self.logprobs += event.logprobs
        elif isinstance(event, Started):
            self.frames = event.frames
        elif isinstance(event, Finished):
            self.finish_reason, self.usage, self.times, self.stop = event.reason, event.usage, event.times, event.stop

    def whole(self) -> Generation:
        """The answer as one value. Raises RuntimeError before its end."""
        if self.finish_reason is None or self.usage is None or self.times is None:
            raise RuntimeError("the answer is not finished")
        return Generation(
            text=self.text,
            ids=self.ids,
            finish_reason=self.finish_reason,
            usage=self.usage,
            times=self.times,
            frames=self.frames,
            request_id=self.request_id,
            logprobs=self.logprobs,
            stop=self.stop,
        )
