"""What media can be opened here, and whether what opens them can be shut in. Asked in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from chiasm.cli.doctor.finding import Check, Finding, Status, judged

GROUP = "media"
SECONDS = 20
REINSTALL = "pip install --force-reinstall -c constraints.txt av pillow"

# By the names of FFmpeg's codecs and of Pillow's features.
_CODECS = """
import json, av
from PIL import features
def has(name):
    try:
        return bool(av.Codec(name, "r"))
    except Exception:
        return False
print(json.dumps({
    "av": av.__version__,
    "video": {name: has(name) for name in ("h264", "hevc", "vp9", "av1")},
    "picture": {name: features.check(name) for name in ("jpg", "zlib", "webp")},
}))
"""

_SANDBOX = """
import json, os
from chiasm.media.confine import confine
network = os.readlink("/proc/self/ns/net")
confine(4 << 30, 64)
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({"filter": status.get("Seccomp") == "2", "network": os.readlink("/proc/self/ns/net") == network}))
"""


def codecs(program: str = _CODECS) -> Finding:
    """Whether what people have can be decoded."""
    said = _ask(program)
    if isinstance(said, str):
        return Finding(GROUP, "codecs", Status.FAIL, said, "PyAV and Pillow", REINSTALL)
    has = said["video"] | said["picture"]
    lacking = [name for name, there in has.items() if not there]
    return judged(
        GROUP,
        "codecs",
        f"PyAV {said['av']}: " + (f"without {', '.join(lacking)}" if lacking else ", ".join(said["video"])),
        well=not lacking,
        expected=", ".join(has),
        fix=REINSTALL,
        bad=Status.FAIL if "h264" in lacking else Status.WARN,
    )


def sandbox(program: str = _SANDBOX) -> Finding:
    """Whether the process that reads strangers' files can be confined. It reads nothing if it cannot."""
    said = _ask(program)
    if isinstance(said, str):
        fix = "allow seccomp in the container (docker: not --security-opt seccomp=… that refuses prctl)"
        return Finding(GROUP, "sandbox", Status.FAIL, said, "a process that can be confined", fix)
    rings = "system call filter" if said["filter"] else "no system call filter"
    reaches = "keeps the network" if said["network"] else "no network"
    return judged(
        GROUP,
        "sandbox",
        f"limits, {rings}, {reaches}",
        well=said["filter"],
        expected="a kernel that filters system calls, on x86_64 or aarch64",
        fix="run on such a kernel; on this one only limits stand between a hostile file and the encoder's account",
        bad=Status.WARN,
    )


def _ask(program: str) -> Any:
    """What a small program printed, as JSON; the last line of its complaint if it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be asked ({type(error).__name__})"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return json.loads(done.stdout)


CHECKS: tuple[Check, ...] = (codecs, sandbox)
