"""What a fleet over Ray is to be, as a file says it: pools of equal workers, and how Ray is reached. No Ray here.

    address: 10.0.0.7:6379
    fleet: clips
    host: node
    pools:
    - {role: encoder, least: 1, most: 4, resources: {encoder: 1}, flags: {model: /models/moss, device: cuda}}
    - {role: decoder, least: 2, most: 2, labels: {zone: a}, flags: {model: /models/moss, device: cuda}}

Paths in `flags` are of the nodes that workers are placed on. Pools of several models make a fleet of several models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Self

import yaml
from blake3 import blake3
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from chiasm.settings import SettingsError
from router.membership import Role
from router.restarts import Patience
from router.scaling import Scale

NAMESPACE: Final = "chiasm"
"""Of the actors' names in Ray."""

RECONNECT_SECONDS: Final = 900
"""For which a driver and the nodes bear that Ray's control store is gone. Ray's own default is 60."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Pool(_Model):
    """Workers that are alike.

    Attributes:
        role: what they are.
        least, most: how many there may be. An encoder's `least` of 0 lets the pool rest until somebody asks.
        resources: of Ray, that each takes: `CPU`, `GPU` and whatever nodes are said to have.
        labels: of Ray, that a node must have.
        flags: of the worker's command line, without dashes; an empty value is a switch. Address and region are not
            among them: the actor chooses those for its node.
        environment: further variables of its process, for example `OMP_NUM_THREADS`.
        scale_patience, scale_settle, scale_calm: seconds, as `router.scaling.Scale` has them.
    """

    role: Role
    least: int = Field(default=1, ge=0, le=1024)
    most: int = Field(default=1, ge=1, le=1024)
    resources: dict[str, float] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    flags: dict[str, str]
    environment: dict[str, str] = Field(default_factory=dict)
    scale_patience: float = Field(default=1.0, ge=0)
    scale_settle: float = Field(default=10.0, ge=0)
    scale_calm: float = Field(default=120.0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least is {self.least}, and most {self.most}")
        if self.least == 0 and self.role == "decoder":
            raise ValueError("decoders do not rest: nobody could say what they serve")
        if chosen := {"arena", "arena-bytes", "listen"} & self.flags.keys():
            raise ValueError(f"{', '.join(sorted(chosen))} in flags: the actor chooses that for its node")
        return self

    @property
    def model(self) -> str:
        """What requests call the model, as far as the flags say; else as it is found."""
        return self.flags.get("name", self.flags.get("model", ""))

    @property
    def scale(self) -> Scale:
        return Scale(self.least, self.most, self.scale_patience, self.scale_settle, self.scale_calm)

    @property
    def kind(self) -> str:
        """Which pool this is, whatever its settings become: 8 hex digits of role and model."""
        return _digest([self.role, self.model], 4)

    @property
    def print(self) -> str:
        """8 hex digits of how its workers run. Others of the same kind are replaced."""
        return _digest([self.resources, self.labels, self.flags, self.environment], 4)


class Plan(_Model):
    """A fleet.

    Attributes:
        address: of Ray, `HOST:PORT`; or the path of a file that holds it, which may come later.
        fleet: its name: controllers of other fleets leave its actors alone.
        host: address that workers listen on; `node` is that of their node.
        auth: how Ray asks who one is: `token` (RAY_AUTH_TOKEN, or ~/.ray/auth_token) or `disabled`.
        arenas: folder in memory for the regions of a machine's nodes; of arena_bytes each.
        beat: seconds between two looks at every worker.
        silence: seconds after which a worker that does not answer is killed and replaced.
        first_delay, longest_delay, steady: seconds, as `router.restarts.Patience` has them.
        drain: seconds that a worker is given to end, beyond those that its own flags give its calls.
    """

    address: str = Field(min_length=1)
    fleet: str = Field(default="fleet", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    host: str = "127.0.0.1"
    auth: Literal["token", "disabled"] = "token"
    arenas: str = "/dev/shm/chiasm-ray"
    arena_bytes: ByteSize = ByteSize(1 << 30)
    pools: tuple[Pool, ...] = Field(min_length=1)
    beat: float = Field(default=1.0, gt=0, le=60)
    silence: float = Field(default=15.0, gt=0, le=3600)
    first_delay: float = Field(default=0.2, ge=0)
    longest_delay: float = Field(default=30.0, ge=0)
    steady: float = Field(default=30.0, ge=0)

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        kinds = [pool.kind for pool in self.pools]
        if len(set(kinds)) < len(kinds):
            raise ValueError("two pools have the same role and model")
        return self

    @property
    def patience(self) -> Patience:
        return Patience(self.first_delay, self.longest_delay, self.steady)

    def where(self) -> str | None:
        """`HOST:PORT` of Ray; None while the file that is to hold it does not."""
        if "/" not in self.address:
            return self.address
        try:
            return Path(self.address).read_text(encoding="ascii").strip() or None
        except OSError:
            return None


def read(path: Path) -> Plan:
    """The plan in a file of YAML. Raises SettingsError."""
    fix = "router/ray_plan.py tells what a plan holds"
    try:
        found = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"the plan of the fleet cannot be read: {error.strerror}", str(path), fix) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise SettingsError("the plan of the fleet is not YAML", str(path), fix) from None
    try:
        return Plan.model_validate(found)
    except ValidationError as error:
        said = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}".removeprefix(": ")
            for problem in error.errors()
        )
        raise SettingsError(f"the plan of the fleet is refused: {said}", str(path), fix) from None


def environment(auth: str) -> dict[str, str]:
    """What a process needs in its environment before it loads Ray, and all that it starts. The same everywhere: a
    driver and a head that disagree about tokens do not find together."""
    return {
        "RAY_AUTH_MODE": auth,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_SECONDS),
        "RAY_DEDUP_LOGS": "0",
    }


def _digest(of: list[str] | list[Mapping[str, object]] | object, nbytes: int) -> str:
    return blake3(json.dumps(of, sort_keys=True).encode()).hexdigest(length=nbytes)
