"""The whole system in one process: router logic, both halves of a model and the memory store, joined by calls.

The same servicers that later stand behind sockets are called directly, message by message. Nothing is shared between
the halves but the store: the encoder half holds no language model, the decoder half no vision transformer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import torch

from chiasm.cache.entry import tenant_root
from chiasm.cache.memory import MemoryStore
from chiasm.errors import ChiasmError, DeadlineExceeded, NotFound
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Limits
from chiasm.models.registry import Model, open_model
from chiasm.rpc.status import from_status, to_status
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from decoder_service.engine import DecoderEngine, token_bytes
from decoder_service.model import DecoderModel
from decoder_service.servicer import DecoderServicer
from encoder_service.engine import EncoderEngine
from encoder_service.servicer import EncoderServicer, EncoderSettings
from router.fleet import Pair
from router.servicer import RouterServicer

TENANT = "local"

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
        media_workers: processes that open media.
    """

    device: str = "cpu"
    dtype: torch.dtype | None = None
    text_tokens: int | None = None
    visual_tokens: int | None = None
    pool_bytes: int = 2 << 30
    store_bytes: int = 1 << 30
    media_workers: int = 1
    max_patches: int = 16_384


class _Encoder:
    """`EncoderCalls` on a servicer in this process."""

    def __init__(self, servicer: EncoderServicer) -> None:
        self.servicer = servicer

    def encode(self, requests: AsyncIterator[epb.EncodeRequest]) -> AsyncIterator[epb.EncodeResponse]:
        return self.servicer.Encode(requests, None)


class _Decoder:
    """`DecoderCalls` on a servicer in this process."""

    def __init__(self, servicer: DecoderServicer) -> None:
        self.servicer = servicer

    def decode(self, requests: AsyncIterator[dpb.DecodeRequest]) -> AsyncIterator[dpb.DecodeResponse]:
        return self.servicer.Decode(requests, None)


class _OnePair:
    """`Fleet` of a single model."""

    def __init__(self, name: str, pair: Pair) -> None:
        self._name = name
        self._pair = pair

    def models(self) -> dict[str, Pair]:
        return {self._name: self._pair}

    def choose(self, model: str) -> Pair:
        if model != self._name:
            shown = model[:160]
            raise NotFound(
                "MODEL_NOT_FOUND",
                f"there is no model {shown!r} here, only {self._name}",
                facts={"model": shown, "models": self._name},
            )
        return self._pair


class LocalService:
    """A running system: what the SDK's in-process client talks to. Used from the event loop it was started on.

    Args:
        asked: another name that requests may call the model by: what it was opened as.

    Attributes:
        name: what the model is called.
        encoder, decoder, store: for those who look inside, tests above all.
    """

    def __init__(self, model: Model, settings: LocalSettings, *, asked: str | None = None) -> None:
        device = torch.device(settings.device)
        dtype = settings.dtype or (torch.float32 if device.type == "cpu" else None)
        fingerprint = model.checkpoint.fingerprint
        workers = secrets.token_bytes(32)
        decoder_half = model.decoder(device=device, dtype=dtype)
        wanted = 4 * decoder_half.max_positions
        per_text, per_visual = token_bytes(decoder_half)
        self.name = model.name
        self._asked = asked
        self.store = MemoryStore(settings.store_bytes)
        self.encoder = EncoderEngine(
            model.encoder(device=device, dtype=dtype),
            model.processor,
            fingerprint=fingerprint,
            store=self.store,
            workers_secret=workers,
            max_patches=settings.max_patches,
        )
        engine = DecoderEngine(
            decoder_half,
            model.processor,
            text_tokens=settings.text_tokens or min(wanted, settings.pool_bytes // per_text),
            visual_tokens=settings.visual_tokens or min(wanted, settings.pool_bytes // per_visual),
        )
        self.decoder = DecoderModel(
            engine, model.prompt(), fingerprint=fingerprint, store=self.store, workers_secret=workers
        )
        limits = Limits()
        self.sandbox = Sandbox(workers=settings.media_workers, limits=limits)
        family = model.family.name
        encoder = EncoderServicer(
            self.encoder,
            self.sandbox,
            EncoderSettings(model=model.name, family=family, device=settings.device),
            limits,
        )
        decoder = DecoderServicer(self.decoder, name=model.name, family=family, device=settings.device)
        pair = Pair(
            fingerprint=self.encoder.identity_digest,
            encoder=_Encoder(encoder),
            decoder=_Decoder(decoder),
            family=family,
            context_limit=self.decoder.context_limit,
            layers=decoder_half.layers_total,
        )
        root = tenant_root(secrets.token_bytes(32), TENANT)
        self.router = RouterServicer(_OnePair(model.name, pair), tenant_root=root)

    @classmethod
    async def start(cls, model: str, settings: LocalSettings | None = None) -> LocalService:
        """Loads a checkpoint: a folder, the name of one that comes with the package, or a hub name (`owner/name`),
        which is downloaded the first time.

        A folder's model is called by the folder's name, one from the hub by its hub name. Requests may also call it
        `model`, as it was given here.

        Raises CheckpointError for one that cannot be served.
        """
        return await asyncio.to_thread(lambda: cls(open_model(model), settings or LocalSettings(), asked=model))

    async def generate(
        self,
        request: rpb.GenerateRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it is the deadline of the call, as gRPC's stubs take it
    ) -> AsyncGenerator[rpb.GenerateResponse, None]:
        """The events of an answer; `timeout` seconds bound the whole of it. Closing the generator cancels the request.

        Raises whatever a server would answer, as the classes of `chiasm.errors`. A fault that nobody foresaw is logged
        with its traceback and raised as a ServerError INTERNAL, as it would come out of a socket.

        A request that names the model as it was opened is given the model's own name in place.
        """
        if request.model == self._asked:
            request.model = self.name
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        responses = self.router.Generate(request, None)
        assert isinstance(responses, AsyncGenerator)
        async with aclosing(responses):
            while True:
                clock = asyncio.timeout_at(end)
                try:
                    async with clock:
                        response = await anext(responses, None)
                except ChiasmError:
                    raise
                except Exception as error:  # whatever it is, a caller is told what one behind a socket would be
                    if isinstance(error, TimeoutError) and clock.expired():
                        raise DeadlineExceeded(f"the request took longer than {timeout} s") from None
                    _log.exception("request %s failed", request.request_id)
                    raise from_status(to_status(error)) from error
                if response is None:
                    return
                yield response

    async def list_models(self) -> rpb.ListModelsResponse:
        return await self.router.ListModels(rpb.ListModelsRequest(), None)

    async def close(self) -> None:
        """Ends everything that was started, the media processes included."""
        await self.sandbox.close()
        await self.encoder.close()
        await self.decoder.close()
