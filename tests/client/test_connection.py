"""What a client is made with: targets, keys, TLS, options of the channel."""

from __future__ import annotations

import asyncio
import subprocess
import warnings
from pathlib import Path
from typing import Any

import grpc
import pytest

from chiasm.client import TLS, AsyncClient, Client
from chiasm.client.connection import TARGET, Headers, check_target
from chiasm.errors import ConnectionFailed, InvalidRequest
from chiasm.rpc.limits import CLIENT_MESSAGE_BYTES
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import router_pb2_grpc
from tests.client.fake import TEXT
from tests.client.router import ScriptedRouter, serving

SUBJECT = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) that a server of this machine shows; it is its own root."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*made, "-days", "2", "-keyout", key, "-out", cert, *SUBJECT], check=True, capture_output=True)
    return cert, key


def test_a_target_is_given_or_of_the_environment_or_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHIASM_TARGET", raising=False)
    assert check_target(None) == TARGET
    monkeypatch.setenv("CHIASM_TARGET", "router:50051")
    assert (check_target(None), check_target("other:1")) == ("router:50051", "other:1")


@pytest.mark.parametrize(
    "target",
    ["localhost:50051", "10.0.0.7:1", "[::1]:50051", "unix:/run/chiasm.sock", "dns:///routers:50051", "a.b-c.svc:443"],
)
def test_every_form_of_target_is_taken(target: str) -> None:
    assert check_target(target) == target


@pytest.mark.parametrize("target", ["http://localhost:50051", "localhost", "", "localhost:", "a b:1", "localhost:port"])
def test_a_target_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(InvalidRequest, match="HOST:PORT"):
        Client(target)


@pytest.mark.parametrize(
    "options", [{"max_retries": 5}, {"connect_timeout": 0}, {"timeout": -1}, {"idle_timeout": float("nan")}]
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client("localhost:1", **options)
    assert caught.value.reason == "FIELD_OUT_OF_RANGE"
    assert caught.value.facts["field"] == next(iter(options))


@pytest.mark.parametrize("made", [{"api_key": "a\nb"}, {"api_key": ""}, {"metadata": {"x-team": "a\nb"}}], ids=repr)
def test_a_header_that_cannot_be_carried_is_refused_and_not_shown(made: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client("localhost:1", **made)
    assert "b" not in str(caught.value.facts.get("value", "")) and "a\nb" not in repr(caught.value)


@pytest.mark.parametrize("name", ["X-Team", "grpc-timeout", "x team", ""])
def test_a_name_that_no_header_has_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Headers(None, {name: "x"})


def test_names_of_other_libraries_are_answered_with_ours() -> None:
    client: Any = Client
    for option, said in {"base_url": "target", "timeuot": "timeout", "default_headers": "metadata"}.items():
        with pytest.raises(InvalidRequest, match=f"Client takes no option '{option}'.*{said}") as caught:
            client(**{option: "x"})
        assert caught.value.reason == "UNKNOWN_FIELD"
    with Client("localhost:1") as made:
        again: Any = made.with_options
        with pytest.raises(InvalidRequest, match="made anew"):
            again(max_retries=0)


async def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with serving(ScriptedRouter()) as server, AsyncClient(server.target, connect_timeout=5) as client:
        assert (await client.generate("fake", "Read.")).text == TEXT


async def test_interceptors_and_options_of_the_caller_are_used() -> None:
    seen: list[str] = []

    class Seeing(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            seen.append(details.method.decode() if isinstance(details.method, bytes) else details.method)
            return await continuation(details, request)

    async with (
        serving(ScriptedRouter()) as server,
        AsyncClient(server.target, interceptors=[Seeing()], compression=grpc.Compression.Gzip) as client,
    ):
        await client.list_models()
        assert (await client.generate("fake", "Read.")).text == TEXT
    assert seen == ["/chiasm.rpc.v1.Router/ListModels"]


# -- TLS ---------------------------------------------------------------------------------------------------------------


async def test_tls_trusts_what_it_was_given_and_nothing_else(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    server = Server("localhost:0", message_bytes=CLIENT_MESSAGE_BYTES, credentials=credentials)
    server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, ScriptedRouter())
    await server.start()
    try:
        for root in (cert, str(cert), cert.read_bytes()):
            async with AsyncClient(f"localhost:{server.port}", tls=TLS(root=root), api_key="k") as client:
                assert (await client.generate("fake", "Read.")).text == TEXT
        async with AsyncClient(f"localhost:{server.port}", tls=True, max_retries=0) as client:
            with pytest.raises(ConnectionFailed):
                await client.list_models()
    finally:
        await server.stop(0)


def test_tls_is_checked_where_it_is_given(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="key is missing"):
        TLS(cert=b"pem")
    with pytest.raises(FileNotFoundError):
        Client("localhost:1", tls=TLS(root=tmp_path / "missing.pem"))
    assert repr(TLS(root=b"pem", cert=b"pem", key=b"secret")) == "TLS(root, cert, key)"


def test_a_key_in_plain_text_to_another_machine_is_worth_a_warning() -> None:
    for make in (Client, AsyncClient):
        with pytest.warns(UserWarning, match="plain text") as caught:
            make("router.example:50051", api_key="k")
        assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Client("localhost:50051", api_key="k").close()
        Client("unix:/run/chiasm.sock", api_key="k").close()
        Client("router.example:50051", api_key="k", tls=True).close()
        Client("router.example:50051").close()


async def test_a_key_that_cannot_be_made_ends_the_call() -> None:
    def broken() -> str:
        raise LookupError("no key today")

    async with serving(ScriptedRouter()) as server, AsyncClient(server.target, api_key=broken) as client:
        with pytest.raises(LookupError, match="no key today"):
            await asyncio.wait_for(client.generate("fake", "Read."), 20)
