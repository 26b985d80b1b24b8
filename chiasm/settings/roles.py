"""What a process can be told: every one that serves, and the workers among them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import ByteSize, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from chiasm.settings.kinds import Address, HttpAddress, is_private

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

    @model_validator(mode="after")
    def _listens_in_private(self) -> Self:
        if not self.insecure and not is_private(self.listen):
            raise ValueError(
                f"listen is {self.listen}: other machines reach that, and there are no keys and no TLS yet; --insecure "
                "allows it where the network itself keeps strangers out"
            )
        return self


class WorkerSettings(RoleSettings):
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
