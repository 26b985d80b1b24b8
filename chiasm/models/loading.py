"""What a worker needs before it can serve, by its settings: the stores of its entries, a device, and how far a loading
is.

It knows torch's names, the stores and the checkpoint. It knows no log and no wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass

import torch

from chiasm.cache.arena import ArenaStore
from chiasm.cache.link import Link
from chiasm.cache.redis import RedisStore, sentinel
from chiasm.cache.region import Region
from chiasm.cache.server import Server, store_id
from chiasm.cache.store import EntryStore
from chiasm.cache.tiers import TieredStore, WritePolicy
from chiasm.failpoints import Step, nowhere
from chiasm.models.registry import Model
from chiasm.models.streaming import Streaming
from chiasm.models.weights import HalfName
from chiasm.settings import SettingsError, WorkerSettings


def region(settings: WorkerSettings) -> Region:
    """The node's region, made if the settings say how large. Blocks while it is made. Raises what `Region` raises."""
    if settings.arena_bytes is None:
        return Region.open(settings.arena)
    return Region.open_or_create(settings.arena, settings.arena_bytes)


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a worker's entries are kept.

    Attributes:
        arena_id: 16 bytes, of the node's region.
        there: whether that is still where others would look for it. What nodes share need not be reached.
        shared_store_id: 16 bytes, of the store that nodes share; None if there is none.
        link: the slowest of the stores that an entry may come through.
    """

    store: EntryStore
    arena_id: bytes
    shared_store_id: bytes | None
    link: EntryStore
    there: Callable[[], bool]


@asynccontextmanager
async def crossing(settings: WorkerSettings, *, step: Step = nowhere) -> AsyncIterator[Crossing]:
    """Opens the node's region and, if the settings name one, the store that nodes share, which need not be reached.

    Args:
        step: is told of what the stores do (`chiasm.failpoints`).

    Raises what `Region` raises, and SettingsError for a password or a certificate that cannot be read.
    """
    server = None if settings.redis is None else Server.of(settings)
    with closing(await asyncio.to_thread(region, settings)) as opened:
        near = ArenaStore(opened, owner_budget=settings.cache_tenant_bytes, ttl=settings.cache_ttl, step=step)
        if server is None:
            yield Crossing(near, opened.arena_id, None, near, opened.is_there)
            return
        link = Link(
            server,
            sentinel=sentinel(settings.redis_namespace),
            timeout=settings.redis_timeout,
            rate=settings.redis_rate,
        )
        far = RedisStore(
            link,
            namespace=settings.redis_namespace,
            ttl=settings.redis_ttl,
            entry_bytes=settings.redis_entry_bytes,
            owner_bytes=settings.redis_owner_bytes,
            step=step,
        )
        policy = WritePolicy(settings.redis_policy)
        async with aclosing(TieredStore(near, far, policy=policy, behind_bytes=settings.redis_behind_bytes)) as tiers:
            yield Crossing(tiers, opened.arena_id, store_id(server.url, settings.redis_namespace), far, opened.is_there)


@contextmanager
def followed(
    model: Model, half: HalfName, progress: Callable[[int, int], object], *, projects: bool = False
) -> Iterator[None]:
    """Tells, while the block loads one half of a model and asks for its fingerprint, how many of the bytes that have to
    be read for that are read: `progress(done, total)`, after each tensor. What it raises ends the loading.
    Behind the block the files are let go.

    Args:
        projects: the half is a decoder's that projects states.
    """
    checkpoint = model.checkpoint
    tensors = checkpoint.tensors
    total = tensors.nbytes(model.weights.names(half, projects=projects)) + (
        0 if checkpoint.fingerprint_known else tensors.nbytes()
    )
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        progress(done, total)

    tensors.on_read = read
    try:
        progress(0, total)
        yield
        progress(total, total)
    finally:
        tensors.on_read = None
        tensors.unmap()


def streaming(settings: WorkerSettings) -> Streaming | None:
    """How the blocks of a worker's half are streamed; None if all of them are to be on the device."""
    if not settings.layerwise_offload:
        return None
    return Streaming(settings.resident_blocks, settings.pin_memory, settings.offload_dir)


def place(device: str, dtype: str | None) -> tuple[torch.device, torch.dtype | None]:
    """A device and a type by torch's names. No type means float32 on a CPU, which computes nothing faster, and else
    the checkpoint's own (None).

    Raises SettingsError for a device that this machine or this build of torch does not have.
    """
    fix = "--device cpu runs everywhere"
    try:
        found = torch.device(device)
    except RuntimeError:
        raise SettingsError(f"{device!r} is no device that torch knows", "--device", fix) from None
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise SettingsError(f"{device} is not there: torch sees {count} CUDA devices", "--device", fix)
    elif found.type != "cpu":
        raise SettingsError(f"{device} is not served: cpu and cuda are", "--device", fix)
    if dtype is not None:
        named = getattr(torch, dtype)
        assert isinstance(named, torch.dtype), dtype
        return found, named
    return found, torch.float32 if found.type == "cpu" else None
