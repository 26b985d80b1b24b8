"""What is installed: Python, the libraries, the stubs of the wire, the shipped checkpoint.

Reads what packages say of themselves; imports none of the large ones.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib import metadata
from pathlib import Path

from chiasm.cli.doctor.finding import Check, Finding, Status, judged
from chiasm.cli.weights import header
from chiasm.errors import CheckpointError
from chiasm.models.finding import SHIPPED

GROUP = "software"
PYTHON = (3, 11)
IN_PROCESS = "chiasm.in_process"


def python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return judged(
        GROUP,
        "python",
        found,
        well=sys.version_info >= PYTHON and sys.platform == "linux",
        expected=f"Python {PYTHON[0]}.{PYTHON[1]} or newer, on Linux",
        fix="make PYTHON=python3.11",
        bad=Status.FAIL,
    )


def torch() -> Finding:
    """Told by its files: loading it would take seconds."""
    version = _version("torch")
    if version is None:
        return Finding(GROUP, "torch", Status.FAIL, "not installed", "torch", "pip install -c constraints.txt -e .")
    build = "for CPUs" if "+cpu" in version else "for GPUs and CPUs"
    cpu_only = "+cpu" in version and has_gpu()
    return judged(
        GROUP,
        "torch",
        f"{version} ({build}), {'an NVIDIA driver is loaded' if has_gpu() else 'no NVIDIA driver is loaded'}",
        well=not cpu_only,
        expected="a CUDA build: this machine has a GPU",
        fix=f"pip install --force-reinstall --no-deps torch=={version.partition('+')[0]}",
        bad=Status.WARN,
    )


def flashinfer() -> Finding:
    there = importlib.util.find_spec("flashinfer") is not None
    return judged(
        GROUP,
        "flashinfer",
        f"{_version('flashinfer-python')}" if there else "not installed",
        well=there or not has_gpu(),
        expected="attention kernels for the GPU",
        fix="pip install -e '.[gpu]'",
        bad=Status.WARN,
    )


def protobuf() -> Finding:
    """The stubs refuse, when they are imported, a runtime that is older than they are."""
    found = f"runtime {_version('protobuf')}"
    try:
        from chiasm.rpc.v1 import common_pb2  # noqa: F401
    except Exception as error:
        fix = "pip install -c constraints.txt -e ."
        return Finding(GROUP, "protobuf", Status.FAIL, f"{found}: {error}", "a runtime as new as the stubs", fix)
    return Finding(GROUP, "protobuf", Status.OK, f"{found}, as new as the stubs")


def entry_point() -> Finding:
    points = [point.value for point in metadata.entry_points(group=IN_PROCESS)]
    return judged(
        GROUP,
        "in process",
        ", ".join(points) or f"no entry point {IN_PROCESS}",
        well=bool(points),
        expected="Client.in_process finds the system by its entry point",
        fix="pip install -e .",
        bad=Status.FAIL,
    )


def services() -> Finding:
    lacking = [name for name in ("encoder_service", "decoder_service", "router") if not importlib.util.find_spec(name)]
    return judged(
        GROUP,
        "services",
        f"not installed: {', '.join(lacking)}" if lacking else "encoder, decoder, router",
        well=not lacking,
        expected="the three services beside the library",
        fix="pip install -e .",
        bad=Status.FAIL,
    )


def checkpoint() -> Finding:
    problems = missing(SHIPPED / "digits")
    return judged(
        GROUP,
        "digits",
        "; ".join(problems) if problems else f"complete, {SHIPPED / 'digits'}",
        well=not problems,
        expected="the shipped checkpoint, whole",
        fix="install the package again, or: git checkout -- chiasm/checkpoints",
        bad=Status.FAIL,
    )


def missing(folder: Path) -> list[str]:
    """What a checkpoint of one file lacks, without reading its weights."""
    problems = [f"{name} is missing" for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    weights = folder / "model.safetensors"
    try:
        _, whole = header(weights)
        size = weights.stat().st_size
    except CheckpointError as error:
        return [*problems, *error.problems]
    except OSError as error:
        return [*problems, f"{weights.name}: {error.strerror}"]
    return problems if size == whole else [*problems, f"{weights.name} has {size} bytes of {whole}"]


def has_gpu() -> bool:
    """Whether an NVIDIA driver is loaded."""
    return Path("/dev/nvidiactl").exists()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


CHECKS: tuple[Check, ...] = (python, torch, flashinfer, protobuf, entry_point, services, checkpoint)
