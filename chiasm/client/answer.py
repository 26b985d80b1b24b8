"""The answer of a stream, gathered from its events. Knows no call."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

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
from chiasm.client.types import ResumePoint


class Answer:
    """What has come so far. All of it is there when the stream has ended.

    Attributes:
        text, ids, logprobs: of the tokens so far.
        frames: every frame of the timeline, from the `Started` event on.
        finish_reason, usage, times: None until the answer is finished.
        stop: the stop string that ended it; None before its end, and where none did.
        request_id: names the request in errors and in the server's logs.
        attempts, resumes: how often it was taken up so far, by servers and by this client.

    Args:
        resume: where it goes on: what came before that is no part of it.
    """

    def __init__(self, request_id: str, resume: ResumePoint | None = None) -> None:
        self.request_id = request_id
        self.attempts = 1
        self.resumes = 0
        self.ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.frames: tuple[TimelineFrame, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None
        self.times: StageTimes | None = None
        self.stop: str | None = None
        self._pieces: list[str] = []
        self._point = resume
        self._before = () if resume is None else resume.ids

    @property
    def resume_point(self) -> ResumePoint | None:
        """Where it can be taken up; None before the server has said how, and when it is finished."""
        if self._point is None or self.finish_reason is not None:
            return None
        return replace(self._point, ids=self._before + self.ids)

    def resumable(self, token: bytes, until: datetime | None) -> None:
        """The server has said how to take it up."""
        self._point = ResumePoint(token, (), self.request_id, until)

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
            attempts=self.attempts,
            resumes=self.resumes,
        )
