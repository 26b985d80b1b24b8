"""Where a Redis server is and as whom it is asked, as settings say it. It connects nothing, and loads no torch.

The server may be Redis 7 or Valkey, over TCP, TLS or a socket file, and the user one who may do little.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from chiasm.settings import SettingsError, SharedStoreSettings, read_password


class Server(NamedTuple):
    """Where a server is, and as whom it is asked.

    Attributes:
        url: `redis://[USER@]HOST[:PORT]`, `rediss://…` for TLS, or `unix://[USER@]/path`; without a password.
        password: None where the server asks for none.
        ca_file: of who signed the server's certificate; None for those that the system trusts.
        cert_file, key_file: the client's own certificate, where the server asks for one.
    """

    url: str
    password: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def of(cls, settings: SharedStoreSettings) -> Server:
        """The one that settings name. Raises SettingsError for a file that cannot be read."""
        assert settings.redis is not None
        files = (settings.redis_ca_file, settings.redis_cert_file, settings.redis_key_file)
        for file in filter(None, files):
            try:
                file.open("rb").close()
            except OSError as error:
                raise SettingsError(f"a file for TLS cannot be read: {error.strerror}", str(file), "check it") from None
        password = None if settings.redis_password_file is None else read_password(settings.redis_password_file)
        return cls(settings.redis, password, *files)

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def pool(self) -> ConnectionPool:
        """What makes connections to it, and keeps none. Connects nothing yet."""
        options: dict[str, object] = {}
        if urlsplit(self.url).scheme == "rediss":
            options = {
                "ssl_ca_certs": self.ca_file and str(self.ca_file),
                "ssl_certfile": self.cert_file and str(self.cert_file),
                "ssl_keyfile": self.key_file and str(self.key_file),
            }
        return ConnectionPool.from_url(
            self.url,
            password=self.password,
            protocol=2,
            driver_info=None,  # the users that `docs/operations.md` describes may not say what they run
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,  # the limit of the whole exchange is the only one
            socket_connect_timeout=None,
            **options,
        )


def store_id(url: str, namespace: str) -> bytes:
    """16 bytes that name what processes of the same URL and namespace share, whoever they are to the server."""
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return hashlib.blake2b(f"{server}\0{namespace}".encode(), digest_size=16).digest()
