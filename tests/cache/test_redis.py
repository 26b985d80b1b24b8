"""The store that nodes share, at a real server that is well: what is put is got, by whoever may, and ends by itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from chiasm.cache.link import Link
from chiasm.cache.manifest import CHUNK_BYTES
from chiasm.cache.place import Elsewhere, InArena, InMemory, InRedis
from chiasm.cache.redis import RedisStore, sentinel
from chiasm.cache.sealed import EntryKey, Sealed
from chiasm.cache.server import Server, store_id
from chiasm.cache.store import Lease
from chiasm.errors import Unavailable
from tests.cache.arenas import KIB, entry, key, same
from tests.redis_server import SYSTEM, RedisServer, redis_server, store_at

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    """Empty."""
    running.admin.flushall()
    return running


@asynccontextmanager
async def store(server: RedisServer | str, **options: Any) -> AsyncIterator[RedisStore]:
    made = store_at(server, **options)
    try:
        yield made
    finally:
        await made.close()


def large(fill: int, nbytes: int = 2 * CHUNK_BYTES + 12_345) -> Sealed:
    """An entry of several values, each unlike the others."""
    payload = bytes([fill]) * CHUNK_BYTES + os.urandom(nbytes - CHUNK_BYTES)
    return Sealed(b"a header", memoryview(payload), bytes([fill]) * 32)


async def kept(store: RedisStore, made: Sealed, at: EntryKey) -> InRedis:
    place = await store.put(made, at)
    assert isinstance(place, InRedis), (place, store.refused)
    return place


@pytest.mark.parametrize("size", [0, 1, 64 * KIB, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_every_size_comes_back_by_its_key_and_by_its_place(server: RedisServer, size: int) -> None:
    put = Sealed(b"a header", memoryview(os.urandom(size)), b"a tag")
    async with store(server) as one, store(server) as other:
        place = await kept(one, put, key("a"))
        assert place.chunks == -(-size // CHUNK_BYTES)
        assert same(await other.get(key("a")), put)
        assert same(await other.get(key("a"), place), put)
        assert len(server.names("*")) == place.chunks + 1


async def test_what_is_not_there_is_none_and_no_error(server: RedisServer) -> None:
    async with store(server) as made:
        place = await kept(made, entry(10 * KIB), key("a"))
        assert await made.get(key("b")) is None
        assert await made.get(key("b"), place) is None, "a place is not believed against the key"
        for elsewhere in (Elsewhere(), InMemory(), InArena(bytes(16), 0, 0)):
            assert await made.get(key("a"), elsewhere) is None
        assert await made.pin(key("b"), Lease.of(1.0)) is None
        assert made.stats().misses == 6
        assert made.rejected.total() == 0


@pytest.mark.parametrize(
    "place", [InRedis(b"", 1), InRedis(bytes(16), 1 << 31), InRedis(bytes(16), 2), InRedis(b"", 0)]
)
async def test_a_place_that_is_wrong_costs_a_trip_and_no_entry(server: RedisServer, place: InRedis) -> None:
    put = large(1)
    async with store(server) as made:
        await kept(made, put, key("a"))
        assert same(await made.get(key("a"), place), put)


async def test_an_entry_put_again_is_read_under_the_place_of_the_old_one(server: RedisServer) -> None:
    async with store(server) as made:
        old = await kept(made, large(1), key("a"))
        new = large(2)
        await kept(made, new, key("a"))
        assert same(await made.get(key("a"), old), new)


async def test_every_value_ends_by_itself_and_the_manifest_first(server: RedisServer) -> None:
    async with store(server, ttl=100.0) as made:
        await kept(made, large(1), key("a"))
        left = {name: server.admin.pttl(name) for name in server.names("*")}
        manifest = [ms for name, ms in left.items() if ":entry:" in name]
        values = [ms for name, ms in left.items() if ":value:" in name]
        assert len(manifest) == 1 and len(values) == 3
        assert 0 < manifest[0] <= 100_000 < min(values)


async def test_a_pin_keeps_an_entry_for_its_lease_and_tells_header_and_place(server: RedisServer) -> None:
    put = large(1)
    async with store(server, ttl=2.0) as made:
        place = await kept(made, put, key("a"))
        pinned = await made.pin(key("a"), Lease.of(500.0))
        assert pinned is not None and (pinned.header, pinned.place) == (put.header, place)
        left = {name: server.admin.pttl(name) for name in server.names("*")}
        assert all(ms > 490_000 for ms in left.values()), left
        assert min(left, key=lambda name: left[name]).startswith("chiasm:entry:")


async def test_a_pin_of_an_entry_that_lost_a_value_is_none(server: RedisServer) -> None:
    async with store(server, ttl=2.0) as made:
        await kept(made, large(1), key("a"))
        assert server.admin.delete(server.names("*:value:*")[1]) == 1
        assert await made.pin(key("a"), Lease.of(500.0)) is None
        assert made.rejected["chunk_missing"] == 1


async def test_what_is_asked_for_goes_on_to_be_kept_and_what_is_fresh_is_left_alone(server: RedisServer) -> None:
    async with store(server, ttl=1000.0) as made:
        await kept(made, large(1), key("a"))
        (name,) = server.names("*:entry:*")
        server.admin.pexpire(name, 900_000)
        await made.pin(key("a"), Lease.of(1.0))
        assert server.admin.pttl(name) <= 900_000
        server.admin.pexpire(name, 400_000)
        await made.pin(key("a"), Lease.of(1.0))
        assert server.admin.pttl(name) > 900_000


async def test_what_is_discarded_is_gone_for_everybody(server: RedisServer) -> None:
    async with store(server) as made, store(server) as other:
        place = await kept(made, large(1), key("a"))
        await other.discard(key("a"))
        assert await made.get(key("a"), place) is None


async def test_a_flush_takes_the_namespace_and_nothing_else(server: RedisServer) -> None:
    server.admin.set("somebody:else", 1)
    async with store(server) as made, store(server, namespace="other") as other:
        for index in range(30):
            await kept(made, entry(KIB), key(str(index)))
        await kept(other, entry(KIB), key("a"))
        await made.flush()
        assert len(server.names("*")) == 3
        assert await other.get(key("a")) is not None


async def test_a_flush_that_the_server_does_not_answer_says_so() -> None:
    async with store("unix:///nowhere/socket") as made:
        with pytest.raises(Unavailable) as caught:
            await made.flush()
        assert caught.value.reason == "SHARED_STORE"


async def test_one_of_many_claims_an_entry_until_it_ends_its_claim(server: RedisServer) -> None:
    async with store(server) as one, store(server) as other:
        took = await asyncio.gather(*(made.claim(key("a"), 60.0) for made in [one, other] * 5))
        assert took.count(True) == 1
        holder, waiter = (one, other) if took.index(True) % 2 == 0 else (other, one)
        await waiter.unclaim(key("a"))
        assert not await waiter.claim(key("a"), 60.0), "who has no claim ends none"
        await holder.unclaim(key("a"))
        assert await waiter.claim(key("a"), 60.0)


async def test_a_claim_ends_by_itself_and_then_takes_nobody_elses_with_it(server: RedisServer) -> None:
    now = [0.0]
    async with store(server, clock=lambda: now[0]) as one, store(server) as other:
        assert await one.claim(key("a"), 60.0)
        assert server.admin.delete(*server.names("*:claim:*")) == 1  # as if its time were over
        assert await other.claim(key("a"), 60.0)
        await one.unclaim(key("a"))
        assert not await one.claim(key("a"), 60.0)
        now[0] = 61.0
        await one.unclaim(key("a"))
        assert len(server.names("*:claim:*")) == 1


async def test_an_owner_gets_no_more_than_its_budget_from_one_writer(server: RedisServer) -> None:
    async with store(server, owner_bytes=100 * KIB) as made:
        places = [await made.put(entry(40 * KIB), key(name), owner=b"an owner") for name in "abc"]
        assert [isinstance(place, InRedis) for place in places] == [True, True, False]
        assert isinstance(await made.put(entry(40 * KIB), key("c"), owner=b"another!"), InRedis)
        assert made.refused["owner_budget"] == 1
        assert made.stats().bytes == 120 * KIB


async def test_a_refused_value_leaves_nothing_behind(server: RedisServer) -> None:
    """A user who may write values and no manifest: nothing is visible, and the values are taken back."""
    server.admin.acl_setuser(
        "half", enabled=True, nopass=True, keys=["chiasm:value:*"], commands=["+set", "+unlink"], reset=True
    )
    async with store(f"unix://half@{server.socket}") as made:
        assert isinstance(await made.put(large(1), key("a")), Elsewhere)
        assert made.refused["denied"] == 1
        assert server.names("*") == []
        assert made.stats().bytes == 0, "nor is anything charged to its owner"
        assert made.link.breaker.closed, "a refusal is an answer"


async def test_what_may_still_be_there_stays_charged() -> None:
    """A user who may not take away what was written of an entry that was refused."""
    with redis_server() as server:
        server.admin.acl_setuser("half", enabled=True, nopass=True, keys=["chiasm:value:*"], commands=["+set"])
        async with store(f"unix://half@{server.socket}") as made:
            assert isinstance(await made.put(put := large(1), key("a")), Elsewhere)
            assert made.stats().bytes == put.size


async def test_values_outlast_their_manifest_by_what_writing_them_may_take(server: RedisServer) -> None:
    async with store(server, ttl=10.0, timeout=50.0) as made:
        await kept(made, large(1), key("a"))
        (manifest,) = server.names("chiasm:entry:*")
        for name in server.names("chiasm:value:*"):
            assert server.admin.pttl(name) > server.admin.pttl(manifest) + 50_000


async def test_a_server_that_lets_nobody_in_is_left_alone_and_the_log_says_why_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does an attempt that was given up while it said who it is leave a socket behind."""
    ended = asyncio.Queue[None]()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(100):
            pass
        ended.put_nowait(None)
        writer.close()

    listening = await asyncio.start_unix_server(silent, tmp_path / "socket")
    link = Link(Server(f"unix://user@{tmp_path}/socket", "a-password"), sentinel="s", timeout=0.05, pause=60.0)
    for _ in range(3):
        assert await link.ask(("GET", "a")) is None
        await ended.get()
    assert await link.ask(("GET", "a")) is None
    assert link.failures["timeout"] == 3
    (told,) = caplog.records
    assert (told.why, told.trouble) == ("timeout", "no answer in time")  # type: ignore[attr-defined]
    await link.close()
    listening.close()


def acl(user: str) -> str:
    """The line of a user as the page for operators shows it, with a password."""
    lines = [line for line in OPERATIONS.read_text("utf-8").splitlines() if line.startswith(f"user {user} ")]
    assert len(lines) == 1, f"docs/operations.md shows one line for {user}"
    return lines[0].replace("#SHA256", ">a-password")


@pytest.mark.parametrize("binary", [None, pytest.param(SYSTEM, id="redis")])
async def test_the_users_of_the_page_for_operators_may_what_they_need_and_no_more(
    binary: str | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if binary is None and "redis" in request.node.callspec.id:
        pytest.skip("redis-server is not installed; the same is tested with Valkey")
    users = tmp_path / "users.acl"
    names = ("chiasm-encoder", "chiasm-decoder", "chiasm-cache")
    users.write_text("user default on nopass ~* &* +@all\n" + "".join(f"{acl(name)}\n" for name in names))
    put = large(1)
    with redis_server("--aclfile", str(users), binary=binary) as server:
        links = [
            Link(Server(f"unix://{name}@{server.socket}", "a-password"), sentinel=sentinel("chiasm"), timeout=5.0)
            for name in names
        ]
        encoder, decoder, clearing = (RedisStore(link, ttl=2.0) for link in links)
        place = await kept(encoder, put, key("a"))
        assert await encoder.claim(key("b"), 1.0)
        await encoder.unclaim(key("b"))
        assert await encoder.pin(key("a"), Lease.of(60.0)) is not None
        assert same(await encoder.get(key("a")), put)
        assert same(await decoder.get(key("a"), place), put)
        assert same(await decoder.get(key("a")), put)
        assert await decoder.link._answers()

        assert isinstance(await decoder.put(put, key("c")), Elsewhere), "a decoder writes nothing"
        assert decoder.refused["denied"] == 1
        await decoder.discard(key("a"))
        assert same(await encoder.get(key("a")), put), "nor takes anything away"
        for link, command in [
            (links[0], ("FLUSHALL",)), (links[0], ("KEYS", "*")), (links[0], ("CONFIG", "GET", "*")),
            (links[0], ("SET", "other", "1")), (links[0], ("EVAL", "return 1", "0")), (links[1], ("GET", "other")),
            (links[1], ("SET", "chiasm:entry:1", "1", "GET")), (links[2], ("GET", "chiasm:entry:1")),
            (links[2], ("UNLINK", "other")), (links[2], ("FLUSHALL",)),
        ]:  # fmt: skip
            replies = await link.ask(command)
            assert replies is not None and getattr(replies[0], "kind", None) == "NOPERM", (command, replies)

        with pytest.raises(Unavailable):
            await encoder.flush()
        await clearing.flush()
        assert await decoder.get(key("a")) is None
        assert all(link.failures.total() == 0 for link in links)
        refused = [told for told in server.admin.acl_log() if "client" in str(told["object"])]
        assert not refused, "a connection asks for nothing that its user may not"
        for made in (encoder, decoder, clearing):
            await made.close()


async def test_a_wrong_password_is_a_store_that_is_not_there(server: RedisServer) -> None:
    server.admin.acl_setuser("locked", enabled=True, passwords=["+right"], keys=["*"], commands=["+@all"], reset=True)
    link = Link(Server(f"unix://locked@{server.socket}", "wrong"), sentinel=sentinel("chiasm"), timeout=5.0)
    made = RedisStore(link)
    assert await made.get(key("a")) is None
    assert isinstance(await made.put(entry(KIB), key("a")), Elsewhere)
    assert await made.claim(key("a"), 1.0)
    assert link.failures["connection"] == 3
    await made.close()


class Certificates:
    """Of an authority, a server at 127.0.0.1 and a client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._openssl("req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -subj /CN=authority -days 2")
        (folder / "san").write_text("subjectAltName=IP:127.0.0.1")
        for name in ("server", "client"):
            self._openssl(f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}")
            sign = f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem -days 2"
            self._openssl(f"{sign} -extfile san")

    def _openssl(self, arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], cwd=self.folder, check=True, capture_output=True)

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


@pytest.mark.skipif(SYSTEM is None, reason="needs a redis-server with TLS on the path")
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_over_tls_both_sides_show_who_they_are(
    run: Callable[[Coroutine[Any, Any, None]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        made = Certificates(tmp_path)
        with redis_server(
            "--tls-port", "0", "--tls-cert-file", str(made["server.pem"]), "--tls-key-file", str(made["server.key"]),
            "--tls-ca-cert-file", str(made["ca.pem"]), "--tls-auth-clients", "yes", binary=SYSTEM,
        ) as server:  # fmt: skip
            port = server.take_tls_port()
            url = f"rediss://127.0.0.1:{port}"
            whole = Server(url, None, made["ca.pem"], made["client.pem"], made["client.key"])
            strangers = (
                Server(url, None, made["ca.pem"]),
                Server(url, None, None, made["client.pem"], made["client.key"]),
            )
            put = large(1)
            link = Link(whole, sentinel=sentinel("chiasm"), timeout=10.0)
            trusted = RedisStore(link)
            place = await kept(trusted, put, key("a"))
            assert same(await trusted.get(key("a"), place), put)
            assert same(await trusted.get(key("a")), put)
            await trusted.close()
            for stranger in strangers:
                link = Link(stranger, sentinel=sentinel("chiasm"), timeout=10.0)
                assert await RedisStore(link).get(key("a"), place) is None
                assert link.failures["connection"] == 1
                await link.close()

    run(scenario())


def test_a_store_is_named_by_where_it_is_and_not_by_who_asks() -> None:
    named = store_id("redis://host:6379", "chiasm")
    assert len(named) == 16
    assert store_id("redis://user@host:6379", "chiasm") == named
    assert store_id("redis://host:6379", "other") != named
    assert store_id("redis://host:6380", "chiasm") != named
    assert store_id("unix://user@/a", "n") == store_id("unix:///a", "n") != store_id("unix:///b", "n")


def test_a_server_does_not_show_its_password() -> None:
    assert "hidden" not in repr(Server("redis://host", "hidden"))
    assert "hidden" not in str(Server("redis://host", "hidden"))
