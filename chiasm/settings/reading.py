"""Reads settings from the command line, the environment and a file, and says what is wrong with them in words."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import Field, ValidationError, create_model
from pydantic_settings import BaseSettings, CliSettingsSource, CliUnknownArgs, EnvSettingsSource
from pydantic_settings.exceptions import SettingsError as _SourceError

from chiasm.settings.refusal import SettingsError
from chiasm.settings.roles import ENV_PREFIX, Settings

S = TypeVar("S", bound=Settings)

_PASSWORD = re.compile(r"(://[^/@]*:)[^/]*@")
"""Where a URL holds one, and should not."""


def load(kind: type[S], argv: Sequence[str], *, program: str) -> S:
    """Settings from the command line, the environment (`CHIASM_…`) and the file that `--config` names.

    `--help` and `--print-config`, which shows every value with its origin, are answered on standard output and end the
    process (SystemExit).

    Args:
        argv: without the program's own name.
        program: what the command line begins with, for example `python -m encoder_service`.

    Raises SettingsError for an unknown flag or key in the file, with the nearest known name, for a value that is
    refused, and for one that is missing. Other names in the environment are left alone: they may be another role's.
    """
    flags = _flags(kind, argv, program)
    sources: dict[str, Mapping[str, Any]] = {"default": {}}
    config = flags.pop("config", None)
    show = flags.pop("print_config", False)
    if config is not None:
        sources[str(config)] = _file(kind, Path(config))
    sources["environment"] = EnvSettingsSource(kind)()
    sources["flag"] = flags
    values = {name: value for source in sources.values() for name, value in source.items()}
    origins = {name: origin for origin, source in sources.items() for name in source}
    try:
        settings = kind(**values)
    except ValidationError as error:
        raise _refused(kind, error, origins, program) from None
    if show in (True, "True"):
        sys.stdout.write(_shown(settings, origins))
        raise SystemExit(0)
    return settings


def _flags(kind: type[Settings], argv: Sequence[str], program: str) -> dict[str, Any]:
    """What the command line says, by field."""
    extended = create_model(
        kind.__name__,
        __base__=kind,
        __doc__=kind.__doc__,
        config=(Path | None, Field(default=None, description="a YAML file with any of these settings")),
        print_config=(bool, Field(default=False, description="show every value with its origin, and end")),
        unknown=(CliUnknownArgs, Field([])),
    )
    try:
        source = CliSettingsSource[Any](
            cast(type[BaseSettings], extended),
            cli_prog_name=program,
            cli_parse_args=list(argv),
            cli_exit_on_error=False,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_ignore_unknown_args=True,
            cli_hide_none_type=True,
            cli_avoid_json=True,
        )
    except _SourceError as error:
        what = str(error).removeprefix("error parsing CLI: ")
        raise SettingsError(what, program, f"{program} --help lists every setting") from None
    said = dict(source())
    unknown = said.pop("unknown", [])
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [_flag(field) for field in extended.model_fields if field != "unknown"]
        what = f"{name} is not a setting" if name.startswith("-") else f"{name!r} is given without a flag"
        raise SettingsError(what, program, _nearest(name, known, program))
    return said


def _file(kind: type[Settings], path: Path) -> dict[str, Any]:
    """What a file says, by field."""
    try:
        read = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(
            f"the settings file cannot be read: {error.strerror}", str(path), "check --config"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        at = getattr(error, "problem_mark", None)
        where = f"{path}:{at.line + 1}" if at is not None else str(path)
        raise SettingsError("the settings file is not YAML", where, "write one `name: value` a line") from None
    if not isinstance(read, dict | None):
        raise SettingsError("the settings file holds no names", str(path), "write one `name: value` a line")
    found = {str(key).replace("-", "_"): value for key, value in (read or {}).items()}
    for name in found:
        if name not in kind.model_fields:
            raise SettingsError(f"{name} is not a setting", str(path), _nearest(name, list(kind.model_fields), ""))
    return found


def _refused(kind: type[Settings], error: ValidationError, origins: Mapping[str, str], program: str) -> SettingsError:
    """All that is wrong with the values, in one line, and where each was said."""
    problems, places = [], []
    for problem in error.errors():
        if not problem["loc"]:  # of several values together
            problems.append(problem["msg"].removeprefix("Value error, "))
            places.append(program)
            continue
        name = str(problem["loc"][0])
        if problem["type"] == "missing":
            problems.append(f"{_flag(name)} is missing")
            places.append(program)
            continue
        secret = name in kind.model_fields and "Secret" in str(kind.model_fields[name].annotation)
        value = "what was given" if secret else _PASSWORD.sub(r"\1…@", ascii(problem["input"]))[:160]
        problems.append(f"{name} is {value}: {problem['msg'].removeprefix('Value error, ')}")
        places.append(_place(name, origins.get(name, "default")))
    return SettingsError("; ".join(problems), ", ".join(dict.fromkeys(places)), f"{program} --help lists every setting")


def _place(name: str, origin: str) -> str:
    return {"flag": _flag(name), "environment": ENV_PREFIX + name.upper()}.get(origin, origin)


def _shown(settings: Settings, origins: Mapping[str, str]) -> str:
    rows = [(_flag(name), str(getattr(settings, name))) for name in type(settings).model_fields]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    places = (origins.get(name, "default") for name in type(settings).model_fields)
    return "".join(
        f"{name:{names}}  {value:{values}}  {place}\n" for (name, value), place in zip(rows, places, strict=True)
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(name: str, known: Sequence[str], program: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    everything = f"{program} --help lists every setting" if program else f"there are {', '.join(known)}"
    return f"did you mean {near[0]}?" if near else everything
