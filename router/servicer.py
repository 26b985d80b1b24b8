"""`Router` on the wire: requests checked, a pair of workers chosen, the coordinator's events told.

What is not built yet answers UNIMPLEMENTED, which the generated base class does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from chiasm.rpc.v1 import router_pb2_grpc
from router.coordinator import Coordinator
from router.fleet import Fleet
from router.request import check_generate


class RouterServicer(router_pb2_grpc.RouterServicer):
    """Serves the models of a fleet.

    Args:
        tenant_root: the secret under which the entries of the one tenant of this router are kept, 32 bytes.
    """

    def __init__(self, fleet: Fleet, *, tenant_root: bytes) -> None:
        self.fleet = fleet
        self._root = tenant_root

    async def Generate(self, request: rpb.GenerateRequest, context: Any) -> AsyncIterator[rpb.GenerateResponse]:
        check_generate(request)
        pair = self.fleet.choose(request.model)
        async with aclosing(Coordinator(request, pair, tenant_root=self._root).run()) as events:
            async for event in events:
                yield event

    async def ListModels(self, request: rpb.ListModelsRequest, context: Any) -> rpb.ListModelsResponse:
        models = [
            rpb.Model(
                name=name,
                family=pair.family,
                operations=[rpb.OPERATION_GENERATE],
                media_kinds=[pb.MEDIA_KIND_IMAGE, pb.MEDIA_KIND_VIDEO],
                context_limit=pair.context_limit,
                layers=pair.layers,
                ready=True,
            )
            for name, pair in sorted(self.fleet.models().items())
        ]
        return rpb.ListModelsResponse(models=models)
