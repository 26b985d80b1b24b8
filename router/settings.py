"""How a router runs."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import ByteSize, Field, model_validator

from chiasm.settings import RoleSettings, Targets


class RouterSettings(RoleSettings):
    """The router: takes requests, brings encoders and decoders together, tells the client what they answer."""

    encoders: Targets = Field((), description="the encoders, parted by commas; dns:///NAME:PORT is all of it")
    decoders: Targets = Field((), description="the decoders, likewise")
    ray_plan: Path | None = Field(
        None, description="instead of both: a file that says which workers Ray is to place (docs/operations.md)"
    )
    ray_keep: bool = Field(False, description="leave those workers when it ends, for the router that comes after")
    tenants_secret_file: Path = Field(description="64 hex digits from which tenants' keys are derived, mode 0600")
    patience: float = Field(30.0, ge=0, le=3600, description="seconds a request waits for a worker to come back")
    max_seconds: float = Field(3600.0, gt=0, le=86_400, description="seconds of one request at most")
    slow_seconds: float = Field(
        30.0, gt=0, le=3600, description="seconds that a client which does not read what waits for it is given"
    )
    fan_out: int = Field(
        1, ge=1, le=64, description="encoders that share the units of a long video; each gets all of its bytes"
    )
    max_requests: int = Field(1024, ge=1, description="requests in flight; further ones are refused")
    max_cost: int = Field(1 << 24, ge=1, description="tokens of those, prompt, media and answer, as they are estimated")
    max_wait: float = Field(
        30.0, gt=0, le=3600, description="seconds to a first token; requests that would wait longer are refused"
    )
    max_memory: ByteSize | None = Field(
        None, gt=0, description="bytes of this process; uploads are refused from 92 % on, requests from 95 % on"
    )
    tenant_requests: int | None = Field(None, ge=1, description="requests of one tenant in flight")
    tenant_cost_per_minute: int | None = Field(None, ge=1, description="tokens that one tenant may ask for in a minute")
    upload_bytes: ByteSize = Field(ByteSize(1 << 30), gt=0, description="bytes of uploads that are kept at a time")
    upload_ttl: float = Field(600.0, gt=0, le=3600, description="seconds that an upload is kept after its last use")

    @model_validator(mode="after")
    def _knows_its_workers(self) -> Self:
        named = [name for name in ("encoders", "decoders") if getattr(self, name)]
        if self.ray_plan is not None and named:
            raise ValueError(f"{' and '.join(named)} are found by ray_plan: say one or the other")
        if self.ray_plan is None and len(named) < 2:
            missing = " and ".join(name for name in ("encoders", "decoders") if name not in named)
            raise ValueError(f"{missing} missing: say where they are, or ray_plan, which has them placed")
        return self
