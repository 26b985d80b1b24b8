"""Where a model runs, and how far its loading is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chiasm.cache.arena import ArenaStore
from chiasm.cache.tiers import TieredStore
from chiasm.errors import Cancelled, Unsupported
from chiasm.models.checkpoint import Checkpoint, split
from chiasm.models.loading import crossing, followed, place, region
from chiasm.models.registry import Model, find, open_model
from chiasm.models.weights import HalfName
from chiasm.settings import SettingsError, WorkerSettings


def test_a_place_is_a_device_and_a_type_by_their_names() -> None:
    assert place("cpu", None) == (torch.device("cpu"), torch.float32)
    assert place("cpu", "bfloat16") == (torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("device", ["cuda:99", "abacus", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(SettingsError, match=device) as caught:
        place(device, None)
    assert caught.value.where == "--device"


@pytest.mark.parametrize(("half", "projects"), [("encoder", False), ("decoder", False), ("decoder", True)])
def test_every_byte_that_is_read_is_told_and_read_once(half: HalfName, projects: bool) -> None:
    model = open_model("digits")
    told: list[tuple[int, int]] = []
    with followed(model, half, lambda done, total: told.append((done, total)), projects=projects):
        model.encoder() if half == "encoder" else model.decoder(projects=projects)
        assert model.checkpoint.fingerprint
    tensors = model.checkpoint.tensors
    total = tensors.nbytes(model.weights.names(half, projects=projects)) + sum(
        tensor.nbytes for tensor in tensors.values()
    )
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert sum(done < total for done, _ in told) > len(tensors) // 2, "it is told as it goes, not at the end"


def test_a_half_whose_fingerprint_is_written_beside_it_is_read_once(tmp_path: Path) -> None:
    whole = open_model("digits")
    split(Checkpoint(find("digits")), whole.weights.names("encoder"), tmp_path / "half")
    model = Model(tmp_path / "half")
    told: list[int] = []
    with followed(model, "encoder", lambda done, total: told.append(total)):
        assert model.checkpoint.fingerprint == whole.checkpoint.fingerprint
    assert told[0] == model.checkpoint.tensors.nbytes()


def test_loading_ends_with_what_is_raised_while_it_is_followed() -> None:
    model = open_model("digits")
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if done:
            raise Cancelled("told to")

    with pytest.raises(Cancelled), followed(model, "decoder", stop):
        model.decoder()
    assert len(seen) == 2
    model.decoder()  # nobody follows any more


def test_looking_for_a_tensor_does_not_read_it() -> None:
    tensors = open_model("digits").checkpoint.tensors
    read: list[int] = []
    tensors.on_read = read.append
    name = next(iter(tensors))
    assert name in tensors
    assert "none" not in tensors
    assert not read
    assert tensors[name].nbytes == tensors.nbytes([name, "none"]) == read[0]


def test_the_region_is_made_only_if_its_size_is_said(tmp_path: Path) -> None:
    def settings(**more: int) -> WorkerSettings:
        given = {"model": "digits", "arena": tmp_path / "arena", "workers_secret_file": tmp_path / "none", **more}
        return WorkerSettings.model_validate(given)

    with pytest.raises(Unsupported, match="there is no arena"):
        region(settings())
    made = region(settings(arena_bytes=1 << 20))
    opened = region(settings())
    assert made.arena_id == opened.arena_id
    opened.close()
    made.close()


def worker(folder: Path, **more: object) -> WorkerSettings:
    made = {"model": "digits", "arena": folder / "arena", "arena_bytes": 1 << 20, "workers_secret_file": folder / "key"}
    return WorkerSettings(**{**made, **more})  # type: ignore[arg-type]


async def test_entries_are_kept_in_the_region_and_in_the_shared_store_where_there_is_one(tmp_path: Path) -> None:
    async with crossing(worker(tmp_path)) as kept:
        assert isinstance(kept.store, ArenaStore)
        assert (len(kept.arena_id), kept.shared_store_id) == (16, None)
        arena_id = kept.arena_id
    password = tmp_path / "password"
    password.touch(0o600)
    password.write_text("hunter2", encoding="ascii")
    named = []
    for user in ("encoder", "decoder"):  # a server that is not there hinders nobody
        settings = worker(tmp_path, redis=f"unix://{user}@/nowhere/socket", redis_password_file=password)
        async with crossing(settings) as kept:
            assert isinstance(kept.store, TieredStore)
            assert kept.arena_id == arena_id
            assert await kept.store.get(bytes(32)) is None
            named.append(kept.shared_store_id)
    assert named[0] == named[1] and len(named[0] or b"") == 16


@pytest.mark.parametrize("file", ["redis_password_file", "redis_ca_file"])
async def test_a_file_of_the_shared_store_that_cannot_be_read_is_told_at_the_start(tmp_path: Path, file: str) -> None:
    settings = worker(tmp_path, redis="rediss://host", **{file: tmp_path / "none"})
    with pytest.raises(SettingsError) as caught:
        async with crossing(settings):
            pass
    assert caught.value.where == str(tmp_path / "none")
    assert not (tmp_path / "arena").exists(), "nothing was made for it"


def test_a_checkpoint_that_was_loaded_is_no_longer_mapped_and_can_be_read_again(tmp_path: Path) -> None:
    whole = Checkpoint(find("digits"))
    split(whole, set(whole.tensors), tmp_path / "loaded")
    model = Model(tmp_path / "loaded")

    def mapped() -> bool:
        return str(tmp_path / "loaded") in Path("/proc/self/maps").read_text(encoding="utf-8")

    with followed(model, "decoder", lambda done, total: None):
        half = model.decoder()
        assert mapped()
    assert not mapped() and half is not None
    name = next(iter(whole.tensors))
    assert torch.equal(model.checkpoint.tensors[name], whole.tensors[name])
