"""`Router` on the wire: requests checked, labelled and bounded in time, then handed to the coordinator.

The plain methods are what a system in one process calls; the capital ones are gRPC's and add what only a socket has:
metadata, and the deadline of the call. What is not built yet answers UNIMPLEMENTED, which the generated base class
does.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from chiasm.cache.tenant import LOCAL
from chiasm.errors import ChiasmError, DeadlineExceeded, NotFound, Unavailable, Unsupported
from chiasm.rpc.line import line
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from router.admission import Admission, AdmissionLimits, check_fits, cost_of
from router.computing import Computing
from router.conditioning import Conditioning
from router.coordinator import Coordinator
from router.embedding import Embedding
from router.estimate import Estimating
from router.fleet import Fleet, Served
from router.meter import Meter, Telling
from router.quarantine import SECONDS, Quarantine
from router.request import (
    check_condition,
    check_embed,
    check_estimate,
    check_generate,
    check_label,
    check_layers,
    item_paths,
)
from router.resume_token import Resumable, ResumeTokens, refused, request_digest
from router.sources import Sources, until
from router.spread import Spread
from router.tenants import Quota, Tenant
from router.uploads import UploadLimits, Uploads
from router.window import PATIENCE, slow_consumer

_log = logging.getLogger(__name__)

E = TypeVar("E", bound=Message)

REQUEST_ID = "x-request-id"
"""Metadata in which a caller may name its request, and in which every call is told its name."""


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Bounds on what a router takes.

    Attributes:
        max_seconds: of one request. Longer deadlines are cut to it, and it stands where there is none.
        quarantine_seconds: for which what ended workers by itself is refused.
        margin: seconds that the router answers before a client's deadline, so that its word, which names the stage, is
            heard; never more than a quarter of the time there is.
        slow_seconds: that a client is given to read, once as much waits for it as may.
        spread: how the units of a long medium are shared out.
        uploads: bounds on media that come by themselves.
        admission: bounds on what is in flight.
        quota: of each tenant.
    """

    max_seconds: float = 3600.0
    quarantine_seconds: float = SECONDS
    margin: float = 0.2
    slow_seconds: float = PATIENCE
    spread: Spread = field(default_factory=Spread)
    uploads: UploadLimits = field(default_factory=UploadLimits)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    quota: Quota = field(default_factory=Quota)


class RouterServicer(router_pb2_grpc.RouterServicer):
    """Serves the models of a fleet.

    Args:
        tenant_root: the secret under which the entries of the tenant `local` are kept, 32 bytes.
        tenant_of: tells from the metadata of a call for whom it is. None: all calls are for `local`.

    Attributes:
        local: the tenant of whoever comes without a name.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        tenant_root: bytes,
        limits: RouterLimits | None = None,
        tenant_of: Callable[[Mapping[str, str]], Tenant] | None = None,
    ) -> None:
        self.fleet = fleet
        self.limits = limits or RouterLimits()
        self.uploads = Uploads(self.limits.uploads)
        self.quarantine = Quarantine(seconds=self.limits.quarantine_seconds)
        self.meter = Meter()
        self.admission = Admission(self.limits.admission, several=tenant_of is not None)
        self.local = Tenant(LOCAL, tenant_root, self.limits.quota)
        self._tenant_of = tenant_of
        self._answering: set[Computing[Any]] = set()

    async def let_go(self) -> None:
        """Ends every answer that still runs with Unavailable DRAINING, behind what waits for its client. Each has been
        told how to go on elsewhere."""
        for work in [*self._answering]:
            await work.failed(Unavailable("DRAINING", "the router is ending", retry_after=1.0))

    # -- what is served ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        request: rpb.GenerateRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it is the deadline of the call
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[rpb.GenerateResponse, None]:
        """The events of an answer. Closing the generator cancels the request.

        Args:
            timeout: seconds until the client gives up.
            tenant: for whom it is; `local` by default.

        Raises ChiasmError, labelled with the request's id.
        """
        label = request.request_id or new_label()
        with self._told("generate", label) as (said, telling):
            deadline = self._deadline(timeout)
            check_generate(request)
            tenant = tenant or self.local
            resumed = self._resumed(request, tenant)
            left, begins = deadline - time.monotonic(), resumed is None
            with self.admission.admit(tenant, cost_of(request), seconds=left, waits=begins) as admitted:
                model = await self._find(request.model, deadline)
                check_fits(request, model.context_limit)
                model = _asked_for(model, rpb.OPERATION_GENERATE)
                if resumed is not None:
                    said["resumes"] = resumed.label
                    model = replace(model, fingerprint=resumed.fingerprint)  # there may be several under one name
                async with self._sources(request, tenant, deadline) as sources:
                    make = partial(Coordinator, request, sources, self.fleet, resumed=resumed)
                    served = self._served(make, request, model, tenant, deadline, said, again=resumed is None)
                    async with aclosing(served) as events:
                        async for event in events:
                            admitted.began()
                            telling(event)
                            yield event

    async def embed(
        self,
        request: rpb.EmbedRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it is the deadline of the call
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[rpb.EmbedResponse, None]:
        """A vector in its pieces, once it is whole, and the end. Arguments and errors are those of `generate`."""
        label = request.request_id or new_label()
        with self._told("embed", label) as (said, _):
            deadline = self._deadline(timeout)
            check_embed(request)
            tenant = tenant or self.local
            left = deadline - time.monotonic()
            with self.admission.admit(tenant, cost_of(request), seconds=left) as admitted:
                model = await self._find(request.model, deadline)
                check_fits(request, model.context_limit)
                model = _asked_for(model, rpb.OPERATION_EMBED)
                async with self._sources(request, tenant, deadline) as sources:
                    make = partial(Embedding, request, sources, self.fleet)
                    async with aclosing(self._served(make, request, model, tenant, deadline, said)) as events:
                        async for event in events:
                            admitted.began()
                            yield event

    async def condition(
        self,
        request: rpb.ConditionRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it is the deadline of the call
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[rpb.ConditionResponse, None]:
        """The states in their pieces as they come, behind the beginning, and the end. Arguments and errors are those of
        `generate`."""
        label = request.request_id or new_label()
        with self._told("condition", label) as (said, _):
            deadline = self._deadline(timeout)
            check_condition(request)
            tenant = tenant or self.local
            left = deadline - time.monotonic()
            with self.admission.admit(tenant, cost_of(request), seconds=left) as admitted:
                model = await self._find(request.model, deadline)
                check_fits(request, model.context_limit)
                model = _asked_for(model, rpb.OPERATION_CONDITION, after=max(request.layers))
                check_layers(request, model.layers)
                async with self._sources(request, tenant, deadline) as sources:
                    make = partial(Conditioning, request, sources, self.fleet)
                    async with aclosing(self._served(make, request, model, tenant, deadline, said)) as events:
                        async for event in events:
                            admitted.began()
                            yield event

    async def _served(
        self,
        make: Callable[..., Computing[E]],
        request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest,
        model: Served,
        tenant: Tenant,
        deadline: float,
        said: dict[str, object],
        *,
        again: bool = True,
    ) -> AsyncGenerator[E, None]:
        """The events of a request.

        Args:
            make: makes it for a model.
            again: it may be made again for another model of the same name, before anything was told of it. Who has
                heard of an answer, now or from another router, is given no other model's.
        """
        while True:
            work = make(
                model,
                tenant_root=tenant.root,
                tenant=tenant.name,
                deadline=deadline,
                spread=self.limits.spread,
                patience=self.limits.slow_seconds,
                quarantine=self.quarantine,
            )
            said["request"] = work.id.hex()
            try:
                with self._counted(work, said):
                    async with aclosing(work.run()) as events:
                        async for event in events:
                            yield event
                return
            except Unavailable as error:
                if error.reason != "MODEL_REPLACED" or work.begun or not again:
                    raise
                found = await self._find(request.model, deadline)
                check_fits(request, found.context_limit)
                if isinstance(request, rpb.ConditionRequest):
                    check_layers(request, found.layers)
                model = _asked_for(found, model.asked, after=model.after)

    async def estimate(
        self,
        request: rpb.EstimateRequest,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it is the deadline of the call
        tenant: Tenant | None = None,
    ) -> rpb.EstimateResponse:
        """What a prompt would cost. Arguments and errors are those of `generate`."""
        label = request.request_id or new_label()
        with self._told("estimate", label) as (said, _):
            deadline = self._deadline(timeout)
            check_estimate(request)
            tenant = tenant or self.local
            left = deadline - time.monotonic()
            with self.admission.admit(tenant, cost_of(request), seconds=left, waits=False):
                model = await self._find(request.model, deadline)
                async with self._sources(request, tenant, deadline) as sources:
                    work = Estimating(
                        request,
                        sources,
                        self.fleet,
                        model,
                        tenant_root=tenant.root,
                        tenant=tenant.name,
                        deadline=deadline,
                    )
                    said["request"] = work.id.hex()
                    return await work.run()

    async def upload(
        self, requests: AsyncIterator[rpb.UploadRequest], *, label: str = "", tenant: Tenant | None = None
    ) -> rpb.UploadResponse:
        """Takes one medium. Raises what `Uploads.receive` and `Admission.check_upload` do."""
        label = label or new_label()
        with self._told("upload", label):
            self.admission.check_upload()
            return await self.uploads.receive((tenant or self.local).root, requests)

    async def models(self) -> rpb.ListModelsResponse:
        """Every model that has been served, in the order of names."""
        models = [
            rpb.Model(
                name=name,
                family=served.family,
                operations=_operations(served),
                media_kinds=[pb.MEDIA_KIND_IMAGE, pb.MEDIA_KIND_VIDEO],
                context_limit=served.context_limit,
                layers=served.layers,
                ready=served.ready,
            )
            for name, served in sorted(self.fleet.models().items())
        ]
        return rpb.ListModelsResponse(models=models)

    # -- over sockets ------------------------------------------------------------------------------------------------

    async def Generate(  # type: ignore[override]  # it writes its responses into the context
        self, request: rpb.GenerateRequest, context: Any
    ) -> None:
        with _named(context, request.request_id) as request.request_id:
            tenant = self._tenant(context)
            async with aclosing(self.generate(request, timeout=context.time_remaining(), tenant=tenant)) as events:
                async for event in events:
                    await self._write(event, context)

    async def Embed(  # type: ignore[override]  # as `Generate`
        self, request: rpb.EmbedRequest, context: Any
    ) -> None:
        with _named(context, request.request_id) as request.request_id:
            tenant = self._tenant(context)
            async with aclosing(self.embed(request, timeout=context.time_remaining(), tenant=tenant)) as events:
                async for event in events:
                    await self._write(event, context)

    async def Condition(  # type: ignore[override]  # as `Generate`
        self, request: rpb.ConditionRequest, context: Any
    ) -> None:
        with _named(context, request.request_id) as request.request_id:
            tenant = self._tenant(context)
            async with aclosing(self.condition(request, timeout=context.time_remaining(), tenant=tenant)) as events:
                async for event in events:
                    await self._write(event, context)

    async def _write(self, event: Message, context: Any) -> None:
        """Sends an event. gRPC takes it as long as the client's own window has room, some megabytes as a rule, and then
        waits for the client to read; what it was given last is all that it keeps."""
        try:
            async with asyncio.timeout(self.limits.slow_seconds):
                await context.write(event)
        except TimeoutError:
            raise slow_consumer(self.limits.slow_seconds) from None

    async def Estimate(self, request: rpb.EstimateRequest, context: Any) -> rpb.EstimateResponse:
        with _named(context, request.request_id) as request.request_id:
            return await self.estimate(request, timeout=context.time_remaining(), tenant=self._tenant(context))

    async def Upload(self, request_iterator: AsyncIterator[rpb.UploadRequest], context: Any) -> rpb.UploadResponse:
        with _named(context) as label:
            return await self.upload(request_iterator, label=label, tenant=self._tenant(context))

    async def ListModels(self, request: rpb.ListModelsRequest, context: Any) -> rpb.ListModelsResponse:
        with _named(context):
            return await self.models()

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _told(self, operation: str, label: str) -> Iterator[tuple[dict[str, object], Telling]]:
        """Counts a request, logs it when it has ended, and names it in its errors. Gives what the line of the log says,
        and what is told each event."""
        with _labelled(label), line(_log, "request") as said, self.meter.request(operation) as telling:
            said |= {"request_id": label, "operation": operation}
            try:
                yield said, telling
            finally:
                said |= telling.facts

    @contextmanager
    def _counted(self, work: Computing[Any], said: dict[str, object]) -> Iterator[None]:
        """Keeps an answer where `let_go` finds it, and tells what its stream went through when it has ended."""
        self._answering.add(work)
        try:
            yield
        finally:
            self._answering.discard(work)
            said |= work.seams
            self.meter.seams(work.seams)

    def _deadline(self, seconds: float | None) -> float:
        """When the request is to be answered, by `time.monotonic`. Raises DeadlineExceeded for a time that is up."""
        if seconds is None:
            seconds = self.limits.max_seconds
        elif seconds <= 0:
            raise DeadlineExceeded("the deadline had passed when the request came", stage="queue")
        else:
            seconds = min(seconds - min(self.limits.margin, seconds / 4), self.limits.max_seconds)
        return time.monotonic() + seconds

    def _resumed(self, request: rpb.GenerateRequest, tenant: Tenant) -> Resumable | None:
        """What the token of a request says that goes on; None for one that begins. Raises as `ResumeTokens.read`."""
        if not request.HasField("resume"):
            return None
        said, sampling = ResumeTokens(tenant.root).read(request.resume.resume_token), request.sampling
        another_seed = sampling.HasField("seed") and sampling.seed != said.seed
        if another_seed or said.request != request_digest(request):
            raise refused()
        return said

    async def _find(self, name: str, deadline: float) -> Served:
        async with until(deadline, "queue"):
            models = await self.fleet.known()
        if name in models:
            return models[name]
        shown = name[:160]
        near = get_close_matches(name, models, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise NotFound(
            "MODEL_NOT_FOUND",
            f"there is no model {shown!r} here, only {', '.join(sorted(models))}{hint}",
            facts={"model": shown, "models": ", ".join(sorted(models)), **({"nearest": near[0]} if near else {})},
        )

    def _tenant(self, context: Any) -> Tenant:
        """For whom a call is."""
        if self._tenant_of is None:
            return self.local
        return self._tenant_of(dict(context.invocation_metadata() or ()))

    def _sources(
        self,
        request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest | rpb.EstimateRequest,
        tenant: Tenant,
        deadline: float,
    ) -> Sources:
        items = item_paths(request.prompt, len(request.media))
        return Sources(self.uploads, tenant.root, request.media, items, deadline)


_DONE: Final[Mapping[rpb.Operation.ValueType, tuple[Callable[[Served], bool], str]]] = {
    rpb.OPERATION_GENERATE: (lambda served: served.generates, "draw no answers"),
    rpb.OPERATION_CONDITION: (lambda served: served.conditions, "tell no states after layers"),
    rpb.OPERATION_EMBED: (lambda served: served.embeds, "make no vectors"),
}
"""By operation, whether the decoders of a model serve it, and what is said of those that do not."""


def _operations(served: Served) -> list[rpb.Operation.ValueType]:
    return [operation for operation, (serves, _) in _DONE.items() if serves(served)]


def _asked_for(model: Served, operation: rpb.Operation.ValueType, *, after: int = 0) -> Served:
    """The model, whose decoders are chosen from those that serve an operation. Raises Unsupported OPERATION_UNSUPPORTED
    if none does."""
    serves, otherwise = _DONE[operation]
    if not serves(model):
        raise Unsupported("OPERATION_UNSUPPORTED", f"the decoders of {model.name} {otherwise}")
    return replace(model, asked=operation, after=after)


def new_label() -> str:
    """A name for a request that came without one."""
    return uuid.uuid4().hex


@contextmanager
def _labelled(label: str) -> Iterator[None]:
    """Errors of the block tell which request they are about."""
    try:
        yield
    except ChiasmError as error:
        if error.request_id is None:
            error.request_id = label
        raise


@contextmanager
def _named(context: Any, name: str = "") -> Iterator[str]:
    """Gives a request its name, its own first, and tells the caller; errors of the block carry it."""
    if not name:
        given = dict(context.invocation_metadata() or ()).get(REQUEST_ID, "")
        check_label(given)
        name = given or new_label()
    check_label(name)
    context.set_trailing_metadata(((REQUEST_ID, name),))
    with _labelled(name):
        yield name
