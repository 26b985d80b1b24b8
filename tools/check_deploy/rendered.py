"""What Compose and kustomize make of the files, by the real programs. Both come as wheels and need no engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PROFILES: Final = ("cpu", "gpu")


class Refused(Exception):
    """A program refused a file; the message is its own."""


def binary(name: str) -> str:
    """The path of a program of this environment, or else of this machine. Raises Refused."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Refused(f"{name} is not there: make installs it")
    return found


def output(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Raises Refused."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise Refused(f"{Path(command[0]).name}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@cache
def compose(profile: str) -> dict[str, Any]:
    """docker-compose.yml as Compose understands it, with a profile and the load. Raises Refused."""
    said = output(
        binary("docker-compose"), "config", "--format", "json", environment={"COMPOSE_PROFILES": f"{profile},load"}
    )
    found: dict[str, Any] = json.loads(said)
    return found


@cache
def kubernetes(overlay: str, *, kuberay: bool) -> tuple[dict[str, Any], ...]:
    """The objects of an overlay, with the component or without. Raises Refused."""
    with tempfile.TemporaryDirectory() as folder:
        k8s = Path(folder) / "k8s"
        shutil.copytree(ROOT / "deploy/k8s", k8s)
        file = k8s / "overlays" / overlay / "kustomization.yaml"
        if kuberay:
            said = file.read_text("utf-8")
            with_it = said.replace("# components:\n# - ", "components:\n- ")
            if with_it == said:
                raise Refused(f"overlays/{overlay} does not say how the component kuberay is taken in")
            file.write_text(with_it, encoding="utf-8")
        return tuple(yaml.safe_load_all(output(binary("kubectl"), "kustomize", str(file.parent))))


def pods(objects: tuple[dict[str, Any], ...]) -> dict[str, dict[str, Any]]:
    """The pod templates among objects, by where they are said."""
    found = {}
    for each in objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Deployment":
            found[name] = each["spec"]["template"]
        elif each["kind"] == "RayCluster":
            found[f"{name} head"] = each["spec"]["headGroupSpec"]["template"]
            found |= {f"{name} {group['groupName']}": group["template"] for group in each["spec"]["workerGroupSpecs"]}
    return found
