"""What a person is shown while processes start and run: weights loading, what died, what was logged.

On a terminal the weights are bars, elsewhere a line for every tenth. Knows records, not processes.
"""

from __future__ import annotations

import json
import sys
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from chiasm.cli.child import WRITTEN_PAST, Record, Tell
from chiasm.cli.system import LISTEN
from chiasm.cli.telling import line, ms, program, size

LIFE: Final = frozenset({"starting", "loading", "listening", "ready", "draining", "stopped"})
"""Events of every role's life, which people see in other words."""

EXAMPLE: Final = '"What happens?" clip.mp4'

FRONT: Final = "router"
"""The role that drains for the callers to see."""

ROLE: Final = "serve"
"""Of records that tell about the whole."""

_STYLES = {"warning": "yellow", "error": "red", "critical": "red"}
_ALWAYS = frozenset({"timestamp", "level", "logger", "event", "role", "exception"})
"""Keys of a record that are not facts of their own."""


def as_json(said: Record) -> None:
    """Tells a record as one line of JSON on standard error."""
    print(json.dumps(said, ensure_ascii=False, default=str), file=sys.stderr, flush=True)


class Board:
    """Tells records to a person.

    Args:
        example: a question and a file, as one would type them.
        quiet: shows loading and what goes wrong, and no other line of a log.
    """

    def __init__(self, console: Console, *, example: str = EXAMPLE, quiet: bool = False) -> None:
        self._console = console
        self._example = example
        self._quiet = quiet
        self._up = False
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

    @property
    def tell(self) -> Tell:
        return self._tell

    def close(self) -> None:
        """Takes the bars away. Twice is fine."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _tell(self, said: Record) -> None:
        event = said["event"]
        if event == "loading" and {"done", "total"} <= said.keys():
            self._loading(str(said["role"]), int(said["done"]), int(said["total"]))
        elif event not in LIFE:
            self._log(said)
        elif event == "draining" and said["role"] == FRONT and self._up:
            wait = f"up to {said['seconds']:g} s for requests that are running"
            self._console.print(line("ending", f"{wait}; Ctrl-C again ends at once"))
        elif event != "ready" or self._quiet:
            return
        elif said["role"] == ROLE:
            self._up = True
            self.close()
            ready = ready_line(str(said["target"]), float(said["seconds"]), self._example)
            self._console.print(ready, style="bold")
        else:
            # Of the router only: a worker's plain port is none's business but the supervisor's.
            http = str(said.get("http", "none")) if said["role"] == FRONT else "none"
            metrics = "" if http == "none" else f", metrics at http://{http}/metrics"
            figure = f"after {ms(float(said['seconds']))}"
            self._console.print(line(str(said["role"]), f"ready{metrics}", figure), style="dim")

    def _loading(self, role: str, done: int, total: int) -> None:
        if self._up:
            return  # one that was started again: that it is ready is told
        if self._console.is_terminal:
            if self._bars is None:
                columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
                self._bars = Progress(*columns, console=self._console, transient=True)
                self._bars.start()
                self._tasks.clear()
            if role not in self._tasks:
                self._tasks[role] = self._bars.add_task(line("loading", role), total=total)
            self._bars.update(self._tasks[role], completed=done, total=total)
            return
        tenth = 10 * done // total if total else 10
        if tenth != self._tenths.get(role) and not self._quiet:
            self._tenths[role] = tenth
            self._console.print(line("loading", f"{role} {10 * tenth} %", f"{size(done)} of {size(total)}"))

    def _log(self, said: Record) -> None:
        level = str(said["level"])
        # Before all is ready, what is written past the log is a warning of a library, or why a role cannot start, which
        # is told when it is given up.
        if level not in _STYLES and (self._quiet or (said["logger"] == WRITTEN_PAST and not self._up)):
            return
        facts = " ".join(f"{key}={value}" for key, value in said.items() if key not in _ALWAYS)
        clock = str(said.get("timestamp", ""))[11:19]
        text = f"{clock} {said['role']} {level if level in _STYLES else ''} {said['event']} {facts}"
        self._console.print(" ".join(text.split()), style=_STYLES.get(level, "dim"))
        if exception := said.get("exception"):
            self._console.print(str(exception), style="dim")


def ready_line(target: str, seconds: float, example: str = EXAMPLE) -> str:
    """The last line before the log: what to do next."""
    host, _, port = target.rpartition(":")
    if host in ("0.0.0.0", "[::]", "127.0.0.1"):
        target = f"localhost:{port}"
    elsewhere = "" if target == f"localhost:{LISTEN.rpartition(':')[2]}" else f" --target {target}"
    return f"ready in {seconds:.1f} s · try: {program()} ask{elsewhere} {example}"
