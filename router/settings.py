"""How a router runs."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, Field

from chiasm.settings import RoleSettings, Targets


class RouterSettings(RoleSettings):
    """The router: takes requests, brings encoders and decoders together, tells the client what they answer."""

    encoders: Targets = Field(min_length=1, description="the encoders, parted by commas; dns:///NAME:PORT is all of it")
    decoders: Targets = Field(min_length=1, description="the decoders, likewise")
    tenants_secret_file: Path = Field(description="64 hex digits from which tenants' keys are derived, mode 0600")
    patience: float = Field(30.0, ge=0, le=3600, description="seconds a request waits for a worker to come back")
    max_seconds: float = Field(3600.0, gt=0, le=86_400, description="seconds of one request at most")
    slow_seconds: float = Field(
        30.0, gt=0, le=3600, description="seconds that a client which does not read what waits for it is given"
    )
    fan_out: int = Field(
        1, ge=1, le=64, description="encoders that share the units of a long video; each gets all of its bytes"
    )
    upload_bytes: ByteSize = Field(ByteSize(1 << 30), gt=0, description="bytes of uploads that are kept at a time")
    upload_ttl: float = Field(600.0, gt=0, le=3600, description="seconds that an upload is kept after its last use")
