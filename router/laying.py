"""What a decoder is told of a timeline, as messages: the opening, the units that media become, and their entries. They
are built from what is known; when they are sent is for others."""

from __future__ import annotations

from collections.abc import Sequence

from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.encoding import Encoding


def laid(
    request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest | rpb.EstimateRequest,
    media: Sequence[Encoding],
) -> dpb.DecodeOpen:
    """The timeline of a request, whatever is asked about it."""
    slots = [dpb.Slot(slot=m.slot, kind=request.media[m.slot].kind, item=m.item) for m in media]
    return dpb.DecodeOpen(prompt=request.prompt, slots=slots)


def opened(request: rpb.GenerateRequest, media: Sequence[Encoding], *, seed: int) -> dpb.DecodeOpen:
    """What is the same in each attempt at an answer."""
    open_ = laid(request, media)
    open_.sampling.CopyFrom(request.sampling)
    open_.seed, open_.sample = seed, dpb.SAMPLE_MODE_WHEN_CLOSED
    open_.prompt_visibility, open_.priority = request.prompt_visibility, request.priority
    return open_


async def computed(
    request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest, media: Sequence[Encoding]
) -> list[bytes]:
    """What a decoder is given to compute, as far as that could be what ends it."""
    sampling = pb.SamplingParams()
    if isinstance(request, rpb.GenerateRequest):
        sampling.CopyFrom(request.sampling)
        sampling.ClearField("seed")
    digests = [
        await medium.source.digest() or asked.handle.encode()
        for medium, asked in zip(media, request.media, strict=True)
    ]
    return [part.SerializeToString(deterministic=True) for part in (request.prompt, sampling)] + digests


def sized_at(medium: Encoding, *, final: bool = False) -> dpb.DecodeRequest:
    """Tells a decoder which units a medium becomes; as final if they are, or if nothing will come of them anyway."""
    sized = medium.sized
    assert sized is not None, "a medium is told about when it is sized"
    told = dpb.DecodeSized(slot=medium.slot, revision=sized.revision, final=sized.final or final, units=sized.units)
    if medium.probe is not None:
        told.source_size.CopyFrom(medium.probe.size)
    return dpb.DecodeRequest(sized=told)


def ready_at(medium: Encoding, ready: epb.EncodeReady) -> dpb.DecodeRequest:
    return dpb.DecodeRequest(ready=dpb.DecodeReady(slot=medium.slot, unit=ready.unit, entry=ready.entry))
