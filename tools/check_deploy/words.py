"""Whether a command line is one: each is given to the parser of the program that it names, which does not run.

Programs of `deploy/bin` are read: what they run is held against its parser with what they are given. It knows the
programs that images bring, and refuses every other.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from chiasm.settings import Settings, SettingsError, load
from tools.check_deploy.rendered import ROOT

ROLES: Final = {
    "encoder_service": ("encoder_service.settings", "EncoderSettings"),
    "decoder_service": ("decoder_service.settings", "DecoderSettings"),
    "router": ("router.settings", "RouterSettings"),
}
OF_THE_SYSTEM: Final = {"install", "sleep"}
# What the server itself accepts is seen where it is started (tests/deploy).
OF_REDIS: Final = {"bind", "protected-mode", "save", "appendonly", "maxmemory", "maxmemory-policy", "aclfile"}
ALSO_KNOWN: Final = {
    "HOME": "the shell",
    "OMP_NUM_THREADS": "OpenMP",
    "CHIASM_RAY_HEAD": "deploy/bin",
    "RAY_STORE_PASSWORD_FILE": "deploy/bin",
}


def fault(words: Sequence[str]) -> str | None:
    """What is wrong with a command line, or None."""
    program, arguments = words[0], list(words[1:])
    script = ROOT / "deploy/bin" / program
    if script.is_file():
        return _fault_of_script(script, arguments)
    if program == "python" and arguments[:1] == ["-m"] and arguments[1] in ROLES:
        return settings_fault(arguments[1], arguments[2:])
    if program == "chiasm":
        from chiasm.cli.app import app

        return _parsed(typer.main.get_command(app), "chiasm", arguments)
    if program == "ray":
        from ray.scripts.scripts import cli

        return _parsed(cli, "ray", arguments)
    if program == "redis-server":
        wrong = [word for word in arguments[::2] if word.removeprefix("--") not in OF_REDIS]
        return f"redis-server: {' '.join(wrong)} not known" if wrong or len(arguments) % 2 else None
    if program == "redis-cli":
        return None if arguments == ["ping"] else "redis-cli is for ping"
    return None if program in OF_THE_SYSTEM else f"no program {program!r} is known"


def settings_fault(role: str, arguments: Sequence[str]) -> str | None:
    """What a role's own parser finds wrong with its flags, or None."""
    module, name = ROLES[role]
    kind: type[Settings] = getattr(importlib.import_module(module), name)
    try:
        load(kind, arguments, program=f"python -m {role}")
    except SettingsError as error:
        return f"{role}: {error.what}"
    return None


def runs(script: Path) -> list[list[str]]:
    """The command lines of `ray` and `ray-node` in a script. What is substituted in them stands for one word."""
    joined = script.read_text("utf-8").replace("\\\n", " ")
    lines = [re.sub(r"\$\(.*?\)", "given", line.strip()) for line in joined.splitlines()]
    found = []
    for line in lines:
        line = line.replace('"$seconds"', "1")
        if begins := re.match(r"(?:exec )?((?:ray|ray-node) .*)", line):
            said = re.split(r" \|\| ?| && ", begins[1])[0]
            found.append([word for word in shlex.split(said) if word != "$@"])
    return found


def _fault_of_script(script: Path, arguments: list[str]) -> str | None:
    said = runs(script)
    passes_on = '"$@"' in script.read_text("utf-8")
    if script.name == "beside-ray-node":
        faults = [fault(line) for line in said] + [fault(arguments)]
    elif passes_on:
        faults = [fault([*line, *arguments]) for line in said]
    else:
        seconds = len(arguments) == 1 and arguments[0].isdecimal()
        faults = [fault(line) for line in said] + [None if seconds else f"{script.name} takes a number of seconds"]
    if not said:
        return f"{script.name} runs nothing that is known"
    return next((one for one in faults if one), None)


def _parsed(command: Any, name: str, arguments: list[str]) -> str | None:
    """Has click parse a command line down to its last verb. Typer brings a click of its own: neither is named."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            context = command.make_context(name, list(arguments))
            if hasattr(command, "resolve_command"):
                verb, found, left = command.resolve_command(context, [*context._protected_args, *context.args])
                return _parsed(found, f"{name} {verb}", left)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return f"{name}: {error.format_message()}"
    return None


def variable_fault(name: str) -> str | None:
    """What is wrong with a variable of the environment, or None: it must be somebody's."""
    if name in ALSO_KNOWN:
        return None
    if name.startswith("CHIASM_"):
        return None if name in _own() else f"{name} is read by nobody"
    if name.startswith("RAY_"):
        return None if _is_rays(name) else f"Ray does not know {name}"
    return f"{name} is read by nobody"


def _own() -> set[str]:
    """The variables that roles and commands read."""
    from chiasm.cli.app import app

    fields = {f"CHIASM_{field.upper()}" for role in ROLES for field in _fields(role)}

    def of(command: Any) -> set[str]:
        names = {name for option in command.params for name in _names(option.envvar)}
        return names.union(*(of(verb) for verb in getattr(command, "commands", {}).values()))

    return fields | of(typer.main.get_command(app)) | {"CHIASM_TARGET"}


def _fields(role: str) -> Mapping[str, Any]:
    module, name = ROLES[role]
    kind: type[Settings] = getattr(importlib.import_module(module), name)
    return kind.model_fields


def _names(envvar: Any) -> list[str]:
    return [envvar] if isinstance(envvar, str) else list(envvar or ())


def _is_rays(name: str) -> bool:
    """Whether Ray's programs hold the name: in Python whole, in C++ without what all of them begin with."""
    import ray

    package = Path(inspect.getfile(ray)).parent
    python = any(name in file.read_text("utf-8", "replace") for file in (package / "_private").rglob("*.py"))
    return python or name.removeprefix("RAY_").encode() in (package / "_raylet.so").read_bytes()
