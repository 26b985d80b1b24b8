"""The whole system in one process: router logic, both halves of a model and the memory store, joined by calls.

The servicers that stand behind sockets elsewhere are called directly, message by message. Nothing is shared between
the halves but the store: the encoder half holds no language model, the decoder half no vision transformer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import torch

from chiasm.attention.choose import AttentionName
from chiasm.cache import wire
from chiasm.cache.form import Form
from chiasm.cache.memory import MemoryStore
from chiasm.cache.tenant import LOCAL, tenant_root
from chiasm.client.transport import Metadata
from chiasm.errors import ChiasmError, DeadlineExceeded, Unavailable
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Limits
from chiasm.models.registry import Model, open_model
from chiasm.models.streaming import Streaming
from chiasm.rpc.replica import replica
from chiasm.rpc.status import from_status, to_status
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from decoder_service.engine import DecoderEngine, pool_tokens
from decoder_service.model import STATES_BYTES, DecoderModel
from decoder_service.servicer import DecoderServicer
from encoder_service.bounds import MAX_PATCHES
from encoder_service.engine import EncoderEngine
from encoder_service.servicer import EncoderServicer
from router.fleet import DecoderWorker, EncoderWorker, Served, Worker
from router.servicer import RouterServicer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How the system in one process runs.

    Attributes:
        dtype: None takes the checkpoint's own on a GPU and float32 on a CPU.
        text_tokens, visual_tokens: what the two pools hold; None makes each four contexts large, but not above
            `pool_bytes`.
        pool_bytes: of each pool at most, where its tokens are not given.
        store_bytes: budget of the entry store.
        cache_tenant_bytes: what the entries of one tenant may take of it; None for all.
        cache_ttl: seconds after which an entry that nobody has used is not served; None for never.
        media_workers: processes that open media.
        max_patches: of one pass through the vision tower; a frame of more goes alone. None takes what is best on the
            device (`encoder_service.bounds`).
        max_unit_patches: of a frame; one of more is refused.
        attention: which kernels the decoder attends with (`chiasm.attention.choose`).
        deterministic: an answer does not depend on what else the decoder computes (`DecoderEngine`).
        form: in which entries pass through the store; by default the plainest that the model has.
        condition_layers: the decoder is cut after so many layers (`Model`).
        states_bytes: as `DecoderModel` has it.
        streaming: how the blocks of both halves come to the device one by one; None for all of them to be there.
    """

    device: str = "cpu"
    dtype: torch.dtype | None = None
    text_tokens: int | None = None
    visual_tokens: int | None = None
    pool_bytes: int = 2 << 30
    store_bytes: int = 1 << 30
    cache_tenant_bytes: int | None = None
    cache_ttl: float | None = None
    media_workers: int = 1
    max_patches: int | None = None
    max_unit_patches: int = MAX_PATCHES
    attention: AttentionName = "auto"
    deterministic: bool = False
    form: Form | None = None
    condition_layers: int | None = None
    states_bytes: int = STATES_BYTES
    streaming: Streaming | None = None


class _Encoder:
    """`EncoderCalls` on a servicer in this process."""

    def __init__(self, servicer: EncoderServicer) -> None:
        self.servicer = servicer

    async def reach(self) -> None:
        """It is here."""

    def encode(
        self,
        requests: AsyncIterator[epb.EncodeRequest],
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        responses = self.servicer.Encode(requests, None)
        assert isinstance(responses, AsyncGenerator), "a call can be closed"
        return responses


class _Decoder:
    """`DecoderCalls` on a servicer in this process."""

    def __init__(self, servicer: DecoderServicer) -> None:
        self.servicer = servicer

    async def reach(self) -> None:
        """It is here."""

    def decode(
        self,
        requests: AsyncIterator[dpb.DecodeRequest],
        *,
        timeout: float | None = None,
    ) -> AsyncGenerator[dpb.DecodeResponse, None]:
        responses = self.servicer.Decode(requests, None)
        assert isinstance(responses, AsyncGenerator), "a call can be closed"
        return responses


class _OnePair:
    """`Fleet` of a single model. Its workers live as long as the process does: one that is lost is ending with it."""

    def __init__(self, model: Served, encoder: _Encoder, decoder: _Decoder) -> None:
        made, taken = encoder.servicer.engine.forms, decoder.servicer.model.forms
        self._model = model
        self._encoder: EncoderWorker = Worker(
            secrets.token_bytes(16), encoder, forms={model.name: [wire.form_code(form) for form in made]}
        )
        self._decoder: DecoderWorker = Worker(
            secrets.token_bytes(16), decoder, forms={model.name: [wire.form_code(form) for form in taken]}
        )
        self._ending = False

    def models(self) -> Mapping[str, Served]:
        return {self._model.name: self._model}

    async def known(self) -> Mapping[str, Served]:
        return self.models()

    async def decoder(self, model: Served, *, keys: Sequence[bytes] = ()) -> DecoderWorker:
        self._check()
        return self._decoder

    def count_encoders(self, model: Served, decoder: DecoderWorker) -> int:
        return 1

    async def encoder(self, model: Served, decoder: DecoderWorker, *, hint: bytes, rank: int = 0) -> EncoderWorker:
        self._check()
        return self._encoder

    def lost(self, worker: EncoderWorker | DecoderWorker) -> None:
        self._ending = True

    def _check(self) -> None:
        if self._ending:
            raise Unavailable("DRAINING", "the system in this process is ending", retry_after=1.0)


class LocalService:
    """A running system: what the SDK's in-process client talks to. Used from the event loop it was started on.

    Args:
        asked: another name that requests may call the model by: what it was opened as.

    Attributes:
        name: what the model is called.
        encoder, decoder, store, memo: for those who look inside, tests above all.
    """

    def __init__(self, model: Model, settings: LocalSettings, *, asked: str | None = None) -> None:
        device = torch.device(settings.device)
        dtype = settings.dtype or (torch.float32 if device.type == "cpu" else None)
        fingerprint = model.checkpoint.fingerprint
        workers = secrets.token_bytes(32)
        projects = settings.form is Form.STATES and not model.entry_shape.overlaid
        decoder_half = model.decoder(device=device, dtype=dtype, projects=projects, streaming=settings.streaming)
        text, visual = pool_tokens(
            decoder_half, text=settings.text_tokens, visual=settings.visual_tokens, most_bytes=settings.pool_bytes
        )
        self.name = model.name
        self._asked = asked
        self.store = MemoryStore(settings.store_bytes, owner_budget=settings.cache_tenant_bytes, ttl=settings.cache_ttl)
        self.encoder = EncoderEngine(
            model.encoder(device=device, dtype=dtype, streaming=settings.streaming),
            model.processor,
            fingerprint=fingerprint,
            store=self.store,
            workers_secret=workers,
            max_patches=settings.max_patches,
            max_unit_patches=settings.max_unit_patches,
        )
        engine = DecoderEngine(
            decoder_half,
            model.processor,
            text_tokens=text,
            visual_tokens=visual,
            attention=settings.attention,
            deterministic=settings.deterministic,
        )
        self.decoder = DecoderModel(
            engine,
            model.prompt(),
            fingerprint=fingerprint,
            text_fingerprint=model.text_fingerprint,
            store=self.store,
            workers_secret=workers,
            form=settings.form,
            states_bytes=settings.states_bytes,
        )
        limits = Limits()
        self.sandbox = Sandbox(workers=settings.media_workers, limits=limits)
        family = model.family.name
        encoder = EncoderServicer(
            self.encoder,
            self.sandbox,
            name=model.name,
            family=family,
            limits=limits,
            me=replica(device=settings.device),
        )
        self.memo = encoder.memo
        decoder = DecoderServicer(self.decoder, name=model.name, family=family, me=replica(device=settings.device))
        served = Served(
            name=model.name,
            fingerprint=self.encoder.identity_digest,
            family=family,
            context_limit=self.decoder.context_limit,
            layers=decoder_half.layers_total,
            generates=decoder_half.headed,
            embeds=decoder_half.headed,
        )
        root = tenant_root(secrets.token_bytes(32), LOCAL)
        fleet = _OnePair(served, _Encoder(encoder), _Decoder(decoder))
        self.router = RouterServicer(fleet, tenant_root=root)

    @classmethod
    async def start(cls, model: str, settings: LocalSettings | None = None) -> LocalService:
        """Loads a checkpoint: a folder, the name of one that comes with the package, or a hub name (`owner/name`),
        which is downloaded the first time.

        A folder's model is called by the folder's name, one from the hub by its hub name. Requests may also call it
        `model`, as it was given here.

        Raises CheckpointError for one that cannot be served.
        """
        given = settings or LocalSettings()

        def started() -> LocalService:
            return cls(open_model(model, condition_layers=given.condition_layers), given, asked=model)

        return await asyncio.to_thread(started)

    async def generate(
        self,
        request: rpb.GenerateRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it is the deadline of the call, as gRPC's stubs take it
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.GenerateResponse, None]:
        """The events of an answer; `timeout` seconds bound the whole of it. Closing the generator cancels the request.

        Raises whatever a server would answer, as the classes of `chiasm.errors`. A fault that nobody foresaw is logged
        with its traceback and raised as a ServerError INTERNAL, as it would come out of a socket.

        A request that names the model as it was opened is given the model's own name in place.
        """
        self._name(request)
        async with aclosing(self.router.generate(request, timeout=timeout)) as responses:
            with _as_told(request.request_id):
                async for response in responses:
                    yield response

    async def embed(
        self,
        request: rpb.EmbedRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.EmbedResponse, None]:
        """A vector in its pieces, and the end. Raises as `generate`, and names the model in place as it does."""
        self._name(request)
        async with aclosing(self.router.embed(request, timeout=timeout)) as responses:
            with _as_told(request.request_id):
                async for response in responses:
                    yield response

    async def condition(
        self,
        request: rpb.ConditionRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> AsyncGenerator[rpb.ConditionResponse, None]:
        """States in their pieces, and the end. Raises as `generate`, and names the model in place as it does."""
        self._name(request)
        async with aclosing(self.router.condition(request, timeout=timeout)) as responses:
            with _as_told(request.request_id):
                async for response in responses:
                    yield response

    async def estimate(
        self,
        request: rpb.EstimateRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> rpb.EstimateResponse:
        """What a prompt would cost. Raises as `generate`, and names the model in place as it does."""
        self._name(request)
        with _as_told(request.request_id):
            return await self.router.estimate(request, timeout=timeout)

    async def upload(
        self,
        requests: AsyncIterator[rpb.UploadRequest],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as above
        metadata: Metadata = (),
    ) -> rpb.UploadResponse:
        """Keeps a medium for the requests that name it. What `requests` raises comes out as it is."""
        clock = asyncio.timeout(timeout)
        try:
            async with clock:
                return await self.router.upload(requests)
        except TimeoutError:
            if not clock.expired():
                raise
            raise DeadlineExceeded(f"the upload took longer than {timeout:g} s", stage="upload") from None

    async def list_models(
        self,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - nothing is waited for
        metadata: Metadata = (),
    ) -> rpb.ListModelsResponse:
        return await self.router.models()

    async def wait_ready(
        self,
        timeout: float,  # noqa: ASYNC109 - nothing is waited for
        *,
        metadata: Metadata = (),
    ) -> None:
        """It is ready since it was started."""

    def _name(
        self, request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest | rpb.EstimateRequest
    ) -> None:
        if request.model == self._asked:
            request.model = self.name

    async def close(self) -> None:
        """Ends everything that was started, the media processes included."""
        await self.sandbox.close()
        await self.encoder.close()
        await self.decoder.close()


@contextmanager
def _as_told(request_id: str) -> Iterator[None]:
    """A fault that nobody foresaw comes out of the block as it would out of a socket, and is logged."""
    try:
        yield
    except ChiasmError:
        raise
    except Exception as error:
        _log.exception("request %s failed", request_id)
        raise from_status(to_status(error)) from error
