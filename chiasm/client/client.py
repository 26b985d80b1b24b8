"""The client for programs without an event loop: `AsyncClient`, driven on a loop in a thread of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Literal, Self

from chiasm.client import convert
from chiasm.client.async_client import AsyncClient
from chiasm.client.attempts import MAX_RESUMES, RESUME_TIMEOUT
from chiasm.client.connection import CONNECT_TIMEOUT, MAX_RETRIES, TLS, ApiKey
from chiasm.client.defaults import IDLE_TIMEOUT, IN_SAMPLING, OF_CLIENT, TIMEOUT, label_of
from chiasm.client.events import Conditioning, Embedding, Estimate, Generation, ModelInfo, StatesDtype
from chiasm.client.keywords import known_keywords
from chiasm.client.loop import LoopThread
from chiasm.client.media import Frames, Handle, Image, Medium, Video
from chiasm.client.stream import GenerationStream, whole
from chiasm.client.transport import Opener, in_process
from chiasm.client.types import Content, Message, ResumePoint, SamplingParams, prompt_of

if TYPE_CHECKING:
    import grpc
    import grpc.aio


class Client:
    """Asks models about text, images and videos.

        with Client("localhost:50051") as client:
            print(client.generate("digits", ["Read the digits.", Video("clip.mp4")]).text)

    Works in any thread, several at a time, and where another event loop runs. Making one touches no network; the first
    call connects. A client that is dropped without `close()` is closed when Python collects it or exits.

    Args: those of AsyncClient. A `transport` is opened at once, on the client's own event loop.
    """

    @known_keywords({"base_url": "target", "url": "target", "host": "target", "default_headers": "metadata"})
    def __init__(
        self,
        target: str | Sequence[str] | None = None,
        *,
        api_key: ApiKey | None = None,
        tls: bool | TLS | None = None,
        timeout: float | None = TIMEOUT,
        idle_timeout: float | None = IDLE_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        max_retries: int = MAX_RETRIES,
        max_resumes: int = MAX_RESUMES,
        resume_timeout: float | None = RESUME_TIMEOUT,
        metadata: Mapping[str, str | bytes] | None = None,
        channel_options: Mapping[str, int | str] | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
        compression: grpc.Compression | None = None,
        transport: Opener | None = None,
    ) -> None:
        self._client = AsyncClient(
            target,
            api_key=api_key,
            tls=tls,
            timeout=timeout,
            idle_timeout=idle_timeout,
            connect_timeout=connect_timeout,
            max_retries=max_retries,
            max_resumes=max_resumes,
            resume_timeout=resume_timeout,
            metadata=metadata,
            channel_options=channel_options,
            interceptors=interceptors,
            compression=compression,
            transport=transport,
        )
        self._loop = LoopThread()
        self._life = _Life(self._client, self._loop)
        if transport is not None:
            try:
                self._loop.run(self._client.open())
            except BaseException:
                self.close()
                raise

    @classmethod
    def in_process(
        cls, model: str = "digits", *, timeout: float | None = TIMEOUT, idle_timeout: float | None = IDLE_TIMEOUT
    ) -> Self:
        """The whole system in this process, with one model: the folder of a checkpoint, the name of one that comes with
        the package, or a hub name (`owner/name`), which is downloaded the first time. What was given here names the
        model in calls, and so does the name that `list_models` tells.

        Raises CheckpointError if the model cannot be served, Unsupported if the package was not installed.
        """
        # Nothing lies between the client and this router that could break.
        return cls(transport=in_process(model), timeout=timeout, idle_timeout=idle_timeout, max_resumes=0)

    @known_keywords(OF_CLIENT)
    def with_options(
        self,
        *,
        timeout: float | EllipsisType | None = ...,
        idle_timeout: float | EllipsisType | None = ...,
        max_resumes: int | EllipsisType = ...,
        resume_timeout: float | EllipsisType | None = ...,
        api_key: ApiKey | EllipsisType | None = ...,
        metadata: Mapping[str, str | bytes] | EllipsisType | None = ...,
    ) -> Self:
        """A copy with other options, on the same connection: closing one of the two closes both. `...` keeps what the
        client has; None means no limit, no key, no metadata."""
        copy = object.__new__(type(self))
        copy._client = self._client.with_options(
            timeout=timeout,
            idle_timeout=idle_timeout,
            max_resumes=max_resumes,
            resume_timeout=resume_timeout,
            api_key=api_key,
            metadata=metadata,
        )
        copy._loop, copy._life = self._loop, self._life
        return copy

    def close(self) -> None:
        """Cancels every open stream and closes the transport. Twice is fine."""
        self._life.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @known_keywords(IN_SAMPLING)
    def stream(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Medium] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
        resume: ResumePoint | None = None,
    ) -> GenerationStream:
        """An answer as it comes. Arguments are those of `AsyncClient.stream`.

        Files are read here, and whatever is wrong with the request is raised here; those that are uploaded beside it
        are read while they are sent. It is sent when the stream is entered.
        """
        label = label_of(request_id, resume)
        outgoing = convert.to_generate(
            model,
            prompt_of(content, messages, token_ids, media),
            request_id=label,
            sampling=sampling,
            max_tokens=max_tokens,
            inline=self._client.inline,
            resume=resume,
        )
        return GenerationStream(self._client.send(lambda: outgoing, label, timeout, resume), self._loop, self._life)

    @known_keywords(IN_SAMPLING)
    def generate(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Medium] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
    ) -> Generation:
        """A whole answer. Arguments are those of `AsyncClient.stream`. Ctrl-C cancels the request."""
        label = label_of(request_id)
        outgoing = convert.to_generate(
            model,
            prompt_of(content, messages, token_ids, media),
            request_id=label,
            sampling=sampling,
            max_tokens=max_tokens,
            inline=self._client.inline,
        )
        return self._loop.run(whole(self._client.send(lambda: outgoing, label, timeout)))

    @known_keywords({"input": "content", "instructions": "system"})
    def embed(
        self,
        model: str,
        content: Content | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Medium] | None = None,
        normalize: bool = True,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
    ) -> Embedding:
        """One vector for a prompt, text and media together. As `AsyncClient.embed`; Ctrl-C cancels the request."""
        return self._loop.run(
            self._client.embed(
                model,
                content,
                system=system,
                messages=messages,
                token_ids=token_ids,
                media=media,
                normalize=normalize,
                timeout=timeout,
                request_id=request_id,
            )
        )

    @known_keywords({"input": "content", "output_hidden_states": "layers", "layer_index": "layer"})
    def condition(
        self,
        model: str,
        content: Content | None = None,
        *,
        layer: int | None = None,
        layers: Sequence[int] | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Medium] | None = None,
        into: Literal["numpy", "torch"] = "numpy",
        dtype: StatesDtype = "float32",
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
    ) -> Conditioning:
        """The states of all tokens of a prompt after chosen layers. As `AsyncClient.condition`; Ctrl-C cancels the
        request."""
        return self._loop.run(
            self._client.condition(
                model,
                content,
                layer=layer,
                layers=layers,
                token_ids=token_ids,
                media=media,
                into=into,
                dtype=dtype,
                timeout=timeout,
                request_id=request_id,
            )
        )

    @known_keywords()
    def estimate(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Medium] | None = None,
        timeout: float | EllipsisType | None = ...,
        request_id: str | None = None,
    ) -> Estimate:
        """What a prompt would cost: frames, sizes, tokens, and the room it leaves. As `AsyncClient.estimate`."""
        return self._loop.run(
            self._client.estimate(
                model,
                content,
                messages=messages,
                token_ids=token_ids,
                media=media,
                timeout=timeout,
                request_id=request_id,
            )
        )

    @known_keywords()
    def upload(
        self,
        medium: Image | Video | Frames,
        *,
        ttl: float | None = None,
        timeout: float | EllipsisType | None = ...,
    ) -> Handle:
        """Sends a medium once, to be asked about many times: `["What happens?", handle]`. As `AsyncClient.upload`."""
        return self._loop.run(self._client.upload(medium, ttl=ttl, timeout=timeout))

    def list_models(self, *, timeout: float | EllipsisType | None = ...) -> tuple[ModelInfo, ...]:
        """The models that may be asked, in the order of their names."""
        return self._loop.run(self._client.list_models(timeout=timeout))

    def wait_ready(self, timeout: float = 60) -> None:
        """Returns when the server takes requests and has a model that is ready. As `AsyncClient.wait_ready`."""
        self._loop.run(self._client.wait_ready(timeout))


class _Life:
    """What a client and its copies end together: by `end()`, or when Python has collected the last of them."""

    def __init__(self, client: AsyncClient, loop: LoopThread) -> None:
        self.end = weakref.finalize(self, _close, client, loop)


def _close(client: AsyncClient, loop: LoopThread) -> None:
    if loop.is_current():
        # Python may collect a client in any thread, in the loop's own too, which cannot wait for itself.
        threading.Thread(target=_close, args=(client, loop)).start()
        return
    try:
        loop.run(client.close())
    finally:
        loop.stop()
