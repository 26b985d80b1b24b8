"""`chiasm serve --ray`: which workers Ray is to place, as the router's plan says it. Knows no Ray.

Without an address the Ray is one of this machine alone, a role beside the router's. With one, the workers are found at
the addresses of their nodes, and everything that their flags name has to be at its path on every node.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from chiasm.cli.failure import MISUSED, CommandFailed

HERE: Final = "local"
"""Instead of an address: a Ray that is started, and ended, with the rest."""


@dataclass(frozen=True, slots=True)
class OverRay:
    """How workers are placed.

    Attributes:
        address: `HOST:PORT` of Ray, or `local`.
        most: workers of a role at most, by role.
        workers_secret: a file on every node; None is that of this run, which only this machine has.
    """

    address: str
    most: Mapping[str, int]
    workers_secret: Path | None

    @property
    def here(self) -> bool:
        return self.address == HERE


def over_ray(
    address: str | None,
    encoders: int,
    decoders: int,
    max_encoders: int | None,
    max_decoders: int | None,
    workers_secret: Path | None,
) -> OverRay | None:
    """What the options say together; None without `--ray`. Raises CommandFailed for what does not go together."""
    if address is None:
        for option, value in (
            ("--max-encoders", max_encoders),
            ("--max-decoders", max_decoders),
            ("--workers-secret-file", workers_secret),
        ):
            if value is not None:
                raise CommandFailed(f"{option} is for workers that Ray places", option, "add --ray", code=MISUSED)
        return None
    host, _, port = address.rpartition(":")
    if address != HERE and not (host and port.isdecimal()):
        raise CommandFailed(f"{address} is not an address of Ray", "--ray", "write HOST:PORT, or --ray", code=MISUSED)
    if address != HERE and workers_secret is None:
        what = "workers on other machines cannot read a secret that is made here"
        fix = "make one on every node (openssl rand -hex 32) and name it with --workers-secret-file"
        raise CommandFailed(what, "--workers-secret-file", fix, code=MISUSED)
    most = {"encoder": max(encoders, max_encoders or 0), "decoder": max(decoders, max_decoders or 0)}
    return OverRay(address, most, workers_secret and workers_secret.absolute())


def plan(
    ray: OverRay,
    *,
    address: str,
    least: Mapping[str, int],
    flags: Mapping[str, Mapping[str, str]],
    arenas: Path | None,
    arena_bytes: int,
    environment: Mapping[str, str],
    insecure: bool,
) -> str:
    """The plan as the router reads it (`router.ray_plan`).

    Args:
        address: where Ray is, or the path of the file that will say so.
        least: workers of each role.
        flags: of each role's workers, with their dashes.
        arenas: where a node's region goes; None for the nodes' own folder in memory.
        environment: of the workers.
        insecure: lets workers listen where other machines reach them.
    """
    switches = {"insecure": ""} if insecure and not ray.here else {}
    said: dict[str, Any] = {
        "address": address,
        "auth": "disabled" if ray.here else os.environ.get("RAY_AUTH_MODE", "token"),
        "host": "node" if switches else "127.0.0.1",
        "arena_bytes": arena_bytes,
        "pools": [
            {
                "role": role,
                "least": least[role],
                "most": ray.most[role],
                "resources": {"GPU": 1} if flags[role].get("--device", "cpu").startswith("cuda") else {},
                "flags": {**{flag.removeprefix("--"): value for flag, value in flags[role].items()}, **switches},
                "environment": dict(environment),
            }
            for role in least
        ],
    }
    if arenas is not None:
        said["arenas"] = str(arenas)
    return json.dumps(said)
