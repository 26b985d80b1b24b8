"""`chiasm serve`: the three processes for one model, until they are told to end.

Says what runs, where, and with what, then what is logged. Knows how to say it; what runs is `chiasm.cli.system`.
"""

from __future__ import annotations

import os
import platform
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from chiasm import __version__
from chiasm.cli import interrupts
from chiasm.cli.board import EXAMPLE, ROLE, Board, as_json
from chiasm.cli.child import Tell, record
from chiasm.cli.failure import facts
from chiasm.cli.interrupts import Interrupts
from chiasm.cli.subject import choose
from chiasm.cli.system import Options, arena_bytes, check_listen, cores, running, threads
from chiasm.cli.telling import line, size
from chiasm.cli.weights import parameters
from chiasm.errors import ChiasmError, InvalidRequest

NOT_SAFE = "anyone who reaches this address can use the model: neither keys nor TLS are built yet"

_LOGGER = "chiasm.cli.serve"


def run(options: Options, console: Console, *, json_log: bool) -> None:
    """The command. Returns after SIGINT or SIGTERM, when nothing runs any more.

    Raises CommandFailed, CheckpointError, OSError.
    """
    reachable = check_listen(options.listen, insecure=options.insecure)
    if options.http is not None:
        check_listen(options.http, insecure=True)  # whoever reaches it learns counts, and can ask nothing
    board = Board(console, example=example(options.folder))
    if not json_log:
        banner(options, console)
    try:
        with suppress(KeyboardInterrupt):  # asked to end, and ended
            interrupts.run(partial(_serve, options, as_json if json_log else board.tell, reachable))
    finally:
        board.close()


async def _serve(options: Options, tell: Tell, reachable: bool, signals: Interrupts) -> None:
    say = partial(record, logger=_LOGGER, role=ROLE)
    if reachable:
        tell(say(NOT_SAFE, level="warning", address=options.listen))
    async with running(options, tell, signals) as system:
        tell(say("ready", level="info", target=system.target, seconds=round(system.seconds, 3)))
        await system.supervisor.wait()


def example(folder: Path) -> str:
    """A question and a file for this model, as one would type them: one that comes with it, where there is one."""
    try:
        subject = choose(None, None, str(folder))
    except InvalidRequest:
        return EXAMPLE
    path, here = subject.path, Path.cwd()
    return f'"{subject.question}" {shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))}'


def log_failure(error: ChiasmError | OSError) -> None:
    """Tells a failure as a line of the log, for those who read nothing else."""
    what, where, fix = facts(error)
    as_json(record(what, level="error", logger=_LOGGER, role=ROLE, where=where, fix=fix))


def banner(options: Options, console: Console) -> None:
    """What is about to run."""
    workers = {"encoder": options.encoders, "decoder": options.decoders}
    roles = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in workers.items())
    each = threads(os.environ, sum(workers.values()))["OMP_NUM_THREADS"]
    console.print(f"chiasm {__version__} · serve · {options.name}", style="bold")
    console.print(line("roles", f"{roles}, 1 router"))
    weights = f"{parameters(options.folder) / 1e6:.1f} M parameters"
    console.print(line("model", f"{weights}, {options.folder}"))
    if options.ray is not None:
        most = ", ".join(f"at most {count} {kind}s" for kind, count in options.ray.most.items())
        console.print(line("ray", f"{'of its own' if options.ray.here else options.ray.address}, {most}"))
    where = f"{options.device}, {options.dtype or 'its usual dtype'}"
    console.print(line("device", f"{where}, {platform.machine()}, {cores()} cores, {each} for each worker"))
    console.print(line("address", f"{options.listen}, metrics {options.http or 'off (--http 127.0.0.1:9090)'}"))
    console.print(line("cache", f"{size(arena_bytes(options))} of shared memory in {options.parent}"))
    if "--redis" in options.redis:
        console.print(line("shared", options.redis["--redis"]))
