"""What a process can be told: every one that serves, and the workers among them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from chiasm.settings.kinds import Address, Failpoints, HttpAddress, RedisUrl, is_private

ENV_PREFIX: Final = "CHIASM_"


class Settings(BaseSettings):
    """What every settings model shares. Only what is passed in counts: see `load`."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class RoleSettings(Settings):
    """What every process that serves can be told (`chiasm.rpc.process`)."""

    listen: Address = Field(
        default="127.0.0.1:0", description="HOST:PORT, where port 0 takes a free one, or unix:/path"
    )
    http: HttpAddress = Field(default="none", description="HOST:PORT for /metrics, /healthz and /readyz, or none")
    log_format: Literal["text", "json"] = Field(default="text", description="how lines on standard error are written")
    insecure: bool = Field(
        default=False, description="listen where other machines reach it, although nobody is asked who he is"
    )
    supervised: bool = Field(
        default=False, description="end when standard input ends, so as never to outlive who started it"
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, le=86_400, description="what running calls are given when it is to end"
    )
    failpoints: Failpoints = Field(
        default="", description="faults that happen in it, POINT=ACTION[@N] parted by semicolons; for rehearsals only"
    )

    @model_validator(mode="after")
    def _listens_in_private(self) -> Self:
        if not self.insecure and not is_private(self.listen):
            raise ValueError(
                f"listen is {self.listen}: other machines reach that, and there are no keys and no TLS yet; --insecure "
                "allows it where the network itself keeps strangers out"
            )
        return self


class SharedStoreSettings(Settings):
    """Where the store that nodes share is, and as whom it is asked."""

    redis: RedisUrl | None = Field(
        default=None,
        description="the store that nodes share: redis://[USER@]HOST:PORT, rediss://… or unix://[USER@]/path",
    )
    redis_password_file: Path | None = Field(default=None, description="its user's password, in a file of 0600")
    redis_ca_file: Path | None = Field(default=None, description="PEM of who signed its certificate (rediss)")
    redis_cert_file: Path | None = Field(default=None, description="PEM of the worker's own certificate (rediss)")
    redis_key_file: Path | None = Field(default=None, description="PEM of the key to that")
    redis_namespace: str = Field(
        default="chiasm", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="what the names of its values begin with"
    )

    @model_validator(mode="after")
    def _redis_is_whole(self) -> Self:
        tls = (self.redis_ca_file, self.redis_cert_file, self.redis_key_file)
        if any(tls) and not (self.redis or "").startswith("rediss://"):
            raise ValueError("redis is not rediss://…, so there is no TLS for redis_ca_file and the like to be used in")
        if (self.redis_cert_file is None) != (self.redis_key_file is None):
            raise ValueError("redis_cert_file and redis_key_file go together")
        if self.redis_password_file is not None and self.redis is None:
            raise ValueError("redis_password_file needs redis")
        return self


class WorkerSettings(SharedStoreSettings, RoleSettings):
    """What an encoder and a decoder can both be told."""

    model: str = Field(description="digits, the folder of a checkpoint, or a hub name (owner/name)")
    name: str | None = Field(
        default=None, min_length=1, description="what requests call the model; default: as it is found"
    )
    arena: Path = Field(description="the shared-memory region of this node")
    arena_bytes: ByteSize | None = Field(
        default=None, gt=0, description="makes the region this large if it is not there"
    )
    cache_tenant_bytes: ByteSize | None = Field(
        default=None, gt=0, description="of the region, what the entries of one tenant may take; default: all of it"
    )
    cache_ttl: float | None = Field(
        default=None,
        gt=0,
        description="seconds after which an entry that nobody has used is not served; default: until it makes room",
    )
    workers_secret_file: Path = Field(description="64 hex digits that all workers of a fleet share, in a file of 0600")
    device: str = Field(default="cpu", description="where the model runs, as torch names it: cpu, cuda, cuda:1")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = Field(
        default=None, description="what it computes in; default: float32 on a CPU, else the checkpoint's own"
    )
    layerwise_offload: bool = Field(
        default=False,
        description="keep the model's blocks on the host and bring them to the device one by one, for weights larger "
        "than the device; slower, and without CUDA graphs or compilation",
    )
    resident_blocks: int = Field(
        default=2, ge=2, description="blocks that are on the device at a time, where they are brought one by one"
    )
    pin_memory: bool = Field(
        default=True, description="lock the host's memory that blocks are brought from, so that the device copies them"
    )
    offload_dir: Path | None = Field(
        default=None,
        description="a folder on a disk for a file of the blocks, on a CPU; default: the system's temporary folder",
    )
    pass_seconds: float = Field(
        default=120.0,
        gt=0,
        le=3600,
        description="what one pass of the model may take; a worker that finishes none for so long, and has some, hangs",
    )
    redis_ttl: float = Field(
        default=3600.0, ge=1, le=30 * 86_400, description="seconds that an entry is kept in it after its last use"
    )
    redis_policy: Literal["through", "behind"] = Field(
        default="behind", description="whether an entry is announced when it is written there too, or before"
    )
    redis_behind_bytes: ByteSize = Field(
        default=ByteSize(256 << 20), ge=0, description="entries that may wait to be written; further ones are not"
    )
    redis_entry_bytes: ByteSize = Field(
        default=ByteSize(128 << 20), gt=0, description="of the largest entry that is sent there"
    )
    redis_owner_bytes: ByteSize | None = Field(
        default=None, gt=0, description="what this worker writes for one tenant within the ttl; default: no bound"
    )
    redis_timeout: float = Field(
        default=0.25, gt=0, le=60, description="seconds that an answer may take, beside its bytes"
    )
    redis_rate: ByteSize = Field(
        default=ByteSize(50_000_000), gt=0, description="bytes a second, the slowest at which bytes are waited for"
    )
