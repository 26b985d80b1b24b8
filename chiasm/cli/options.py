"""Options that several verbs have, and how what is typed is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TARGET = "localhost:50051"


def size(text: str) -> int:
    """Bytes, with or without a unit."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is no size: write bytes, or a unit as in 512MiB or 4GiB") from None


def redis_url(text: str) -> str:
    """A URL that holds no password, so that it may be shown and handed on."""
    from pydantic import TypeAdapter, ValidationError

    from chiasm.settings import RedisUrl

    try:
        url: str = TypeAdapter(RedisUrl).validate_python(text)
    except ValidationError as error:
        raise typer.BadParameter(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return url


Json = Annotated[
    bool, typer.Option("--json", help="Prints one JSON object last; what is for people goes to standard error.")
]
OneJson = Annotated[bool, typer.Option("--json", help="Prints one JSON object instead.")]
Arena = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        envvar="CHIASM_ARENA",
        help="The shared-memory region. Default: that of the `chiasm serve` that runs here.",
    ),
]
Target = Annotated[
    str, typer.Option(envvar="CHIASM_TARGET", help="Where the router listens.", show_envvar=True, metavar="HOST:PORT")
]
Redis = Annotated[
    str | None,
    typer.Option(
        parser=redis_url,
        envvar="CHIASM_REDIS",
        metavar="URL",
        help="A Redis that nodes share: redis://USER@HOST:PORT, rediss://… for TLS, or unix:///path/to/socket.",
    ),
]
RedisPasswordFile = Annotated[
    Path | None, typer.Option(envvar="CHIASM_REDIS_PASSWORD_FILE", help="Its user's password, in a file of 0600.")
]
RedisCaFile = Annotated[
    Path | None, typer.Option(envvar="CHIASM_REDIS_CA_FILE", help="PEM of who signed its certificate.")
]
RedisCertFile = Annotated[
    Path | None, typer.Option(envvar="CHIASM_REDIS_CERT_FILE", help="PEM of one's own certificate.")
]
RedisKeyFile = Annotated[Path | None, typer.Option(envvar="CHIASM_REDIS_KEY_FILE", help="PEM of the key to that.")]
RedisNamespace = Annotated[
    str | None,
    typer.Option(envvar="CHIASM_REDIS_NAMESPACE", metavar="NAME", help="What names begin with in it. Default: chiasm."),
]
