"""The wire's words about media to ours and back. Nothing else of the encoder knows protobuf but its servicer."""

from __future__ import annotations

from collections.abc import Sequence

from chiasm.errors import InvalidRequest
from chiasm.media.sample import SamplingOptions, eligible, seconds_covered
from chiasm.media.types import Decoded, Kind, Probed, RawFrame
from chiasm.models.family import MediumFacts, MediumPlan
from chiasm.rpc.times import to_duration, to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb

_KINDS: dict[int, Kind] = {pb.MEDIA_KIND_IMAGE: "image", pb.MEDIA_KIND_VIDEO: "video", pb.MEDIA_KIND_FRAME: "image"}


def kind_of(kind: int) -> Kind:
    """Raises InvalidRequest for a kind that is unspecified or unknown."""
    if kind not in _KINDS:
        raise InvalidRequest("FIELD_OUT_OF_RANGE", f"media kind {kind} is not known", facts={"field": "kind"})
    return _KINDS[kind]


def frame_of(header: pb.FrameHeader, data: bytes) -> bytes | RawFrame:
    """One frame of a list from its header and its bytes."""
    if not header.HasField("raw"):
        return data
    return RawFrame(data, header.raw.size.height, header.raw.size.width, header.raw.channels)


def offsets_of(listed: pb.FrameList) -> list[float] | None:
    """Times of a frame list: one each, or a rate for all. None where there are none; times are never invented."""
    given = [frame.HasField("frame_offset") for frame in listed.frames]
    if listed.HasField("fps"):
        if any(given):
            raise InvalidRequest("SAMPLING_CONFLICT", "frames have times and a rate, one of the two is needed")
        if not 0 < listed.fps <= 1000:
            raise InvalidRequest(
                "FIELD_OUT_OF_RANGE", f"fps is {listed.fps}, must be more than 0, at most 1000", facts={"field": "fps"}
            )
        return [i / listed.fps for i in range(len(listed.frames))]
    if not any(given):
        return None
    return [to_seconds(frame.frame_offset) for frame, has in zip(listed.frames, given, strict=True) if has]


def sampling_options(sampling: pb.MediaSampling, *, every_frame: bool) -> SamplingOptions:
    def number(name: str) -> float | None:
        return getattr(sampling, name) if sampling.HasField(name) else None  # type: ignore[arg-type]

    def seconds(name: str) -> float | None:
        return to_seconds(getattr(sampling, name)) if sampling.HasField(name) else None  # type: ignore[arg-type]

    least, most = number("min_frames"), number("max_frames")
    return SamplingOptions(
        fps=number("fps"),
        min_frames=None if least is None else int(least),
        max_frames=None if most is None else int(most),
        start=seconds("start_offset"),
        end=seconds("end_offset"),
        timestamps=tuple(map(to_seconds, sampling.exact_offsets)) or None,
        every_frame=every_frame,
    )


def probe(probed: Probed, options: SamplingOptions, kind: pb.MediaKind.ValueType) -> pb.Probe:
    """What the siblings are told of a medium."""
    message = pb.Probe(
        kind=kind,
        format=probed.found,
        size=pb.Size(height=probed.height, width=probed.width),
        frames_in_file=probed.frames_in_file,
        animated=probed.animated,
        flags=probed.flags,
    )
    if probed.kind == "video":
        message.frames_in_file = len(probed.frame_offsets)
        message.duration.CopyFrom(to_duration(probed.duration))
        message.listed = options.every_frame
        message.eligible_frames = len(eligible(probed.frame_offsets, options))
        covered = seconds_covered(probed.frame_offsets, probed.duration, options)
        message.eligible_duration.CopyFrom(to_duration(covered))
    return message


def sized(
    plan: MediumPlan,
    indices: Sequence[int],
    offsets: Sequence[float],
    *,
    revision: int,
    bytes_per_token: int,
    final: bool = False,
) -> epb.EncodeSized:
    """The units that the frames at `indices` become.

    Args:
        offsets: seconds of every frame of the file.
    """
    grid = pb.Grid(t=1, h=plan.grid[0], w=plan.grid[1])
    units = [
        pb.Unit(
            index=number,
            grid=grid,
            tokens=plan.tokens,
            frames=[pb.UnitFrame(file_index=i, frame_offset=to_duration(offsets[i])) for i in of_unit],
        )
        for number, of_unit in enumerate(indices[at : at + plan.span] for at in range(0, len(indices), plan.span))
    ]
    return epb.EncodeSized(
        revision=revision,
        final=final,
        units=units,
        resized_size=pb.Size(height=plan.height, width=plan.width),
        bytes_per_token=bytes_per_token,
    )


def usage(
    plan: MediumPlan, indices: Sequence[int], probed: Probed, decoded: Decoded, kind: pb.MediaKind.ValueType
) -> pb.MediaUsage:
    """What became of a medium, but for its slot and what of it was cached."""
    units = plan.units_of(len(indices))
    altered = [*(["upscaled"] if plan.upscaled else []), *(["truncated"] if decoded.truncated else [])]
    return pb.MediaUsage(
        kind=kind,
        format=probed.found,
        frames_in_file=max(probed.frames_in_file, len(probed.frame_offsets)),
        frames_decoded=decoded.frames,
        frames_used=len(indices),
        grid=pb.Grid(t=units, h=plan.grid[0], w=plan.grid[1]),
        tokens=plan.tokens * units,
        source_size=pb.Size(height=probed.height, width=probed.width),
        resized_size=pb.Size(height=plan.height, width=plan.width),
        frame_offsets=[to_duration(probed.frame_offsets[i]) for i in indices] if plan.kind == "video" else [],
        flags=list(dict.fromkeys([*probed.flags, *decoded.flags, *altered])),
        units=units,
    )


def wants(go: epb.EncodeGo, unit: int) -> bool:
    """Whether a unit's entry is wanted."""
    if go.none:
        return False
    return not go.units or any(run.first <= unit < run.first + run.count for run in go.units)


def sibling_facts(sibling: epb.Sibling) -> MediumFacts:
    """What budgets need to know of a sibling, or of the medium itself: every call of a request uses these numbers."""
    p = sibling.probe
    kind = kind_of(p.kind)
    if kind == "image":
        return MediumFacts("image", p.size.height, p.size.width, 1, 0.0, SamplingOptions())
    return MediumFacts(
        "video",
        p.size.height,
        p.size.width,
        p.eligible_frames if p.HasField("eligible_frames") else p.frames_in_file,
        to_seconds(p.eligible_duration),
        sampling_options(sibling.sampling, every_frame=p.listed),
    )
