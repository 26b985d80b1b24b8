"""The asynchronous client. It does the work of both: `chiasm.client.client` is the same without an event loop.

Knows which calls there are and what they take by default. How a call is carried is the transport's matter.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from chiasm.client import checks, convert, reading
from chiasm.client.attempts import MAX_RESUMES, RESUME_TIMEOUT, Patience
from chiasm.client.call import within
from chiasm.client.connection import CONNECT_TIMEOUT, MAX_RETRIES, TLS, ApiKey, Headers, check_targets, remote
from chiasm.client.convert import INLINE_BYTES, Outgoing
from chiasm.client.defaults import IDLE_TIMEOUT, IN_SAMPLING, OF_CLIENT, TIMEOUT, Defaults, Link, label_of
from chiasm.client.events import Conditioning, Embedding, Estimate, Generation, ModelInfo, StatesDtype
from chiasm.client.keywords import known_keywords
from chiasm.client.media import Frames, Handle, Image, Medium, Video
from chiasm.client.sending import send, sending
from chiasm.client.stream import AsyncGenerationStream, whole
from chiasm.client.transport import Metadata, Opener, Transport, in_process
from chiasm.client.types import Content, Message, ResumePoint, SamplingParams, plain_prompt_of, prompt_of
from chiasm.client.upload import Upload
from chiasm.errors import InvalidRequest
from chiasm.rpc.limits import MAX_SECONDS
from chiasm.rpc.v1.router_pb2 import (
    EmbedResponse,
    EstimateResponse,
    GenerateRequest,
    ListModelsResponse,
    UploadResponse,
)

if TYPE_CHECKING:
    import grpc
    import grpc.aio

T = TypeVar("T")


class AsyncClient:
    """Asks models about text, images and videos.

        async with AsyncClient("localhost:50051") as client:
            async with client.stream("digits", ["Read the digits.", Video("clip.mp4")]) as stream:
                async for event in stream:
                    ...

    Making a client touches no network, and neither does entering its context; the first call connects. `close()` or
    leaving the context cancels what still runs. It belongs to one event loop.

    Args:
        target: `HOST:PORT`, `unix:PATH`, `dns:///HOST:PORT`, or several of them, in a sequence or with commas between
            them: the first is asked, and the next when one cannot be reached. None: `CHIASM_TARGET` of the environment,
            else `localhost:50051`.
        api_key: sent as `authorization: Bearer …`; a function or a coroutine function is asked for each call. None:
            `CHIASM_API_KEY` of the environment, if it is there.
        tls: True trusts what the system trusts; TLS(...) says more; None and False are plain text.
        timeout: seconds of a whole call; None for no limit. The server is told.
        idle_timeout: seconds between two events of a stream; None for no limit.
        connect_timeout: seconds that a call waits for a connection.
        max_retries: how often a call is sent again that ended with UNAVAILABLE before anything was answered; 0 to 4.
        max_resumes: how often an answer that broke after it had begun is taken up where it was; 0: it is not.
        resume_timeout: seconds that this is tried, each time; None: as long as `timeout` allows.
        metadata: goes beside every call.
        channel_options: gRPC's own, which win over this library's.
        interceptors: of `grpc.aio`, the first outermost, for example OpenTelemetry's.
        compression: of what is sent. Media are compressed already.
        transport: opens what carries the calls, in place of a target.

    Raises InvalidRequest for an option out of range, TypeError for one of another kind, OSError for a certificate that
    cannot be read.
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
        if transport is None:
            if api_key is None:
                api_key = os.environ.get("CHIASM_API_KEY") or None
            openers = [
                remote(
                    one,
                    secret=api_key is not None,
                    tls=tls,
                    connect_timeout=connect_timeout,
                    max_retries=max_retries,
                    channel_options=channel_options,
                    interceptors=interceptors,
                    compression=compression,
                )
                for one in check_targets(target)
            ]
            inline: int | None = INLINE_BYTES
        elif target is not None:
            raise TypeError("give a target or a transport")
        else:
            openers, inline = [transport], None
        patience = Patience(timeout, idle_timeout, max_resumes, resume_timeout)
        self._defaults = Defaults(patience, Headers(api_key, metadata), inline)
        self._link = Link(openers)

    @classmethod
    def in_process(
        cls, model: str = "digits", *, timeout: float | None = TIMEOUT, idle_timeout: float | None = IDLE_TIMEOUT
    ) -> Self:
        """The whole system in this process, with one model: the folder of a checkpoint, the name of one that comes with
        the package, or a hub name (`owner/name`), which is downloaded the first time. What was given here names the
        model in calls, and so does the name that `list_models` tells.

        Returns at once; the model is loaded when the client is opened.
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
        mine = self._defaults
        headers = Headers(
            mine.headers.api_key if isinstance(api_key, EllipsisType) else api_key,
            mine.headers.metadata if isinstance(metadata, EllipsisType) else metadata,
        )
        copy = object.__new__(type(self))
        copy._link = self._link
        was = mine.patience
        patience = Patience(
            was.timeout if isinstance(timeout, EllipsisType) else timeout,
            was.idle_timeout if isinstance(idle_timeout, EllipsisType) else idle_timeout,
            was.max_resumes if isinstance(max_resumes, EllipsisType) else max_resumes,
            was.resume_timeout if isinstance(resume_timeout, EllipsisType) else resume_timeout,
        )
        copy._defaults = replace(mine, patience=patience, headers=headers)
        return copy

    @property
    def inline(self) -> int | None:
        """Bytes of media that a request may carry itself; what does not fit is uploaded beside it. None: all."""
        return self._defaults.inline

    async def open(self) -> None:
        """Opens the transport, once. Raises ChiasmError if it cannot be, RuntimeError after `close()`."""
        await self._link.routes.current()

    async def close(self) -> None:
        """Cancels every open stream and closes the transport. Twice is fine."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
    ) -> AsyncGenerationStream:
        """An answer as it comes.

        Args:
            model: the name of a model.
            content: what the user says: text, a medium, or a sequence of both.
            messages: several turns instead of `content`, a system message first if there is one.
            token_ids: or a prompt that the caller's own tokenizer wrote, laid as it is, without a template.
            media: of `token_ids`: each fills one run of pad tokens, in order.
            sampling: how tokens are drawn.
            max_tokens: bounds the answer; takes the place of the one in `sampling`.
            timeout: seconds of the whole call, from entering the stream; None for no limit, `...` for the client's own.
            request_id: 1 to 128 printable ASCII characters. Made if absent.
            resume: goes on where another stream of the same request was (`stream.resume_point`). Only what comes from
                there on is told.

        Raises TypeError unless exactly one of `content`, `messages` and `token_ids` is given, InvalidRequest for a
        timeout that is none. What is wrong with the request itself is raised when the stream is entered.
        """
        prompt = prompt_of(content, messages, token_ids, media)
        label = label_of(request_id, resume)
        outgoing = partial(
            convert.to_generate,
            model,
            prompt,
            request_id=label,
            sampling=sampling,
            max_tokens=max_tokens,
            inline=self._defaults.inline,
            resume=resume,
        )
        return self.send(outgoing, label, timeout, resume)

    def send(
        self,
        outgoing: Callable[[], Outgoing[GenerateRequest]],
        request_id: str,
        timeout: float | EllipsisType | None,
        resume: ResumePoint | None = None,
    ) -> AsyncGenerationStream:
        """The stream of a request that is there, or is made when the stream is entered. For `Client`."""
        stream = AsyncGenerationStream(
            self._link.routes,
            outgoing,
            self._defaults.headers,
            self._defaults.waiting(timeout),
            request_id=request_id,
            resume=resume,
        )
        self._link.streams.add(stream)
        return stream

    @known_keywords(IN_SAMPLING)
    async def generate(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Medium] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        timeout: float | EllipsisType | None = ...,  # noqa: ASYNC109 - the server is told it as well
        request_id: str | None = None,
    ) -> Generation:
        """A whole answer. Arguments and errors are those of `stream`; cancelling the task cancels the request."""
        return await whole(
            self.stream(
                model,
                content,
                messages=messages,
                token_ids=token_ids,
                media=media,
                sampling=sampling,
                max_tokens=max_tokens,
                timeout=timeout,
                request_id=request_id,
            )
        )

    @known_keywords({"input": "content", "instructions": "system"})
    async def embed(
        self,
        model: str,
        content: Content | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Medium] | None = None,
        normalize: bool = True,
        timeout: float | EllipsisType | None = ...,  # noqa: ASYNC109 - the server is told it as well
        request_id: str | None = None,
    ) -> Embedding:
        """One vector for a prompt, text and media together: the state of its last token after the final norm.

        What runs together is computed together; many are asked for with `asyncio.gather`. A conversation is laid with
        the model's template, up to where its answer would begin; `token_ids` are laid as they are.

        Args:
            system: what the model is told first, beside `content`.
            normalize: the vector is scaled to length 1.

        Further arguments and errors are those of `generate`; cancelling the task cancels the request. Raises TypeError
        for `system` beside another than `content`.
        """
        prompt = prompt_of(content, messages, token_ids, media, system=system)
        outgoing = partial(
            convert.to_embed,
            model,
            prompt,
            request_id=label_of(request_id),
            normalize=normalize,
            inline=self._defaults.inline,
        )
        ready = await asyncio.to_thread(outgoing)

        async def ask(transport: Transport, left: float | None, metadata: Metadata) -> list[EmbedResponse]:
            call = transport.embed(ready.request, timeout=left, metadata=metadata)
            async with sending(transport, ready.uploads, left, metadata), aclosing(call) as responses:
                return [response async for response in responses]

        label = ready.request.request_id
        return reading.to_embedding(await self._ask(ask, timeout, label), label)

    @known_keywords({"input": "content", "output_hidden_states": "layers", "layer_index": "layer"})
    async def condition(
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
        timeout: float | EllipsisType | None = ...,  # noqa: ASYNC109 - the server is told it as well
        request_id: str | None = None,
    ) -> Conditioning:
        """The states of all tokens of a prompt after chosen layers of the model's decoder: what other models are
        conditioned on. No template is laid: the parts of `content` follow one another as they are.

        Args:
            layer: after which one, counted from 1.
            layers: after which ones, each once. Exactly one of the two is given.
            into: what they come as. "torch" loads torch, which needs to be installed.
            dtype: in which they are sent.

        Further arguments and errors are those of `generate`; cancelling the task cancels the request. Raises TypeError
        unless one of `layer` and `layers` is given, InvalidRequest FIELD_OUT_OF_RANGE for layers that are none,
        Unavailable DECODER_LOST where that happened while they were sent: they may be asked for again.
        """
        if (layer is None) == (layers is None):
            raise TypeError("give one of layer= and layers=")
        if into not in ("numpy", "torch"):
            raise InvalidRequest.out_of_range("into", str(into), "numpy or torch")
        if into == "torch":
            await asyncio.to_thread(reading.torch_there)  # before anything is sent
        numbers = [layer] if layer is not None else [*(layers or ())]
        prompt = plain_prompt_of(content, token_ids, media)
        outgoing = partial(
            convert.to_condition,
            model,
            prompt,
            request_id=label_of(request_id),
            layers=numbers,
            dtype=dtype,
            inline=self._defaults.inline,
        )
        ready = await asyncio.to_thread(outgoing)

        async def ask(transport: Transport, left: float | None, metadata: Metadata) -> reading.StatesReader:
            reader = reading.StatesReader(numbers, dtype, alone=layer is not None)
            call = transport.condition(ready.request, timeout=left, metadata=metadata)
            async with sending(transport, ready.uploads, left, metadata), aclosing(call) as responses:
                async for response in responses:
                    reader.read(response)
            return reader

        label = ready.request.request_id
        reader = await self._ask(ask, timeout, label)
        return await asyncio.to_thread(reader.whole, label, into)

    @known_keywords()
    async def estimate(
        self,
        model: str,
        content: Content | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        media: Sequence[Medium] | None = None,
        timeout: float | EllipsisType | None = ...,  # noqa: ASYNC109 - the server is told it as well
        request_id: str | None = None,
    ) -> Estimate:
        """What a prompt would cost: frames, sizes, tokens, and the room it leaves. Nothing is encoded.

        Arguments are those of `stream`. A prompt that is too long is no error here: `room` is 0, and `fits_with` says
        what would fit.
        """
        prompt = prompt_of(content, messages, token_ids, media)
        outgoing = partial(
            convert.to_estimate_request,
            model,
            prompt,
            request_id=label_of(request_id),
            inline=self._defaults.inline,
        )
        ready = await asyncio.to_thread(outgoing)

        async def ask(transport: Transport, left: float | None, metadata: Metadata) -> EstimateResponse:
            async with sending(transport, ready.uploads, left, metadata):
                return await transport.estimate(ready.request, timeout=left, metadata=metadata)

        return reading.to_estimate(await self._ask(ask, timeout, ready.request.request_id))

    @known_keywords()
    async def upload(
        self,
        medium: Image | Video | Frames,
        *,
        ttl: float | None = None,
        timeout: float | EllipsisType | None = ...,  # noqa: ASYNC109 - the server is told it as well
    ) -> Handle:
        """Sends a medium once, to be asked about many times: `["What happens?", handle]`.

        Files are read piece by piece. How to choose frames is said with each question, as `Video(handle, fps=2)`.

        Args:
            ttl: seconds that the server keeps it after its last use, within the server's limit; None: its own value.

        Raises InvalidRequest for a medium that is none, or one with options on which nothing was asked yet; OSError for
        a path that cannot be read; Overloaded UPLOADS_FULL.
        """
        checks.number("ttl", ttl, 0.001, MAX_SECONDS)
        sent = await asyncio.to_thread(Upload.alone, medium, ttl)

        def ask(transport: Transport, left: float | None, metadata: Metadata) -> Awaitable[UploadResponse]:
            return send(transport, sent, left, metadata)

        return reading.to_handle(await self._ask(ask, timeout, label_of(None)), sent.header, medium)

    async def list_models(
        self,
        *,
        timeout: float | EllipsisType | None = ...,  # noqa: ASYNC109 - the server is told it as well
    ) -> tuple[ModelInfo, ...]:
        """The models that may be asked, in the order of their names."""

        def ask(transport: Transport, left: float | None, metadata: Metadata) -> Awaitable[ListModelsResponse]:
            return transport.list_models(timeout=left, metadata=metadata)

        return reading.to_models(await self._ask(ask, timeout, label_of(None)))

    async def wait_ready(self, timeout: float = 60) -> None:  # noqa: ASYNC109 - how long to wait
        """Returns when the server takes requests and has a model that is ready.

        Raises ConnectionFailed if no server answered within `timeout` seconds, Unavailable NOT_READY if one did and was
        not ready, and at once what waiting would not change, as AuthenticationFailed.
        """
        checks.seconds("timeout", timeout)
        await self._link.routes.wait_ready(timeout, await self._defaults.headers())

    async def _ask(
        self,
        ask: Callable[[Transport, float | None, Metadata], Awaitable[T]],
        timeout: float | EllipsisType | None,  # noqa: ASYNC109 - as above
        request_id: str,
    ) -> T:
        """The answer of the first router that takes a call."""
        seconds = self._defaults.waiting(timeout).timeout
        await self._link.routes.current()
        metadata = await self._defaults.headers(request_id)

        def call(transport: Transport, left: float | None) -> Awaitable[T]:
            return ask(transport, left, metadata)

        return await within(self._link.routes.first(call, seconds), seconds)
