"""How a process runs: one model per role, filled from flags, environment and file, in this order of precedence.

A role's settings are a subclass of `RoleSettings`, a worker's of `WorkerSettings`. `load` alone reads the command line
and the environment; settings that a program makes itself (`EncoderSettings(model=…)`) read nothing. What the values
mean to torch, gRPC or a store is not known here.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar, cast

import yaml
from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, ValidationError, create_model, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliUnknownArgs,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError as _SourceError

from chiasm.errors import ChiasmError

ENV_PREFIX: Final = "CHIASM_"

S = TypeVar("S", bound="Settings")


class SettingsError(ChiasmError):
    """Settings with which a process cannot start: what is wrong, where it was said, and what to do."""

    code = "FAILED_PRECONDITION"
    reason = "SETTINGS_REFUSED"

    def __init__(self, what: str, where: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def _again(self) -> partial[Self]:
        return partial(type(self), self.what, self.where, self.fix)


# -- kinds of values ---------------------------------------------------------------------------------------------------


def _host_and_port(value: str, *, lowest: int) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdecimal() and lowest <= int(port) <= 65535


def _address(value: str) -> str:
    if not re.fullmatch(r"unix:.+", value) and not _host_and_port(value, lowest=0):
        raise ValueError("must be HOST:PORT (port 0 takes a free one) or unix:/path/to/socket")
    return value


def _http_address(value: str) -> str:
    if value != "none" and not _host_and_port(value, lowest=0):
        raise ValueError("must be HOST:PORT (port 0 takes a free one), or none")
    return value


def _target(value: str) -> str:
    named = re.fullmatch(r"dns:///(.+)", value)
    if not re.fullmatch(r"unix:.+", value) and not _host_and_port(named[1] if named else value, lowest=1):
        raise ValueError("must be HOST:PORT, dns:///NAME:PORT or unix:/path/to/socket")
    return value


def _parts(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Address: TypeAlias = Annotated[str, AfterValidator(_address)]
"""Where a server listens: `HOST:PORT` or `unix:/path/to/socket`."""

HttpAddress: TypeAlias = Annotated[str, AfterValidator(_http_address)]
"""Where the plain port listens: `HOST:PORT`, or `none`."""

Target: TypeAlias = Annotated[str, AfterValidator(_target)]
"""What a channel takes: `HOST:PORT`, `dns:///NAME:PORT` or `unix:/path/to/socket`."""

Targets: TypeAlias = Annotated[tuple[Target, ...], NoDecode, BeforeValidator(_parts)]
"""Targets parted by commas."""


def is_private(address: str) -> bool:
    """Whether only this machine can connect to an address: a socket file, or a loopback address."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- settings ----------------------------------------------------------------------------------------------------------


class Settings(BaseSettings):
    """What every settings model shares. Only what is passed in counts: see `load`."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class RoleSettings(Settings):
    """What every process that serves can be told (`chiasm.rpc.process`)."""

    listen: Address = Field(
        default="127.0.0.1:0", description="HOST:PORT, where port 0 takes a free one, or unix:/path"
    )
    http: HttpAddress = Field(default="none", description="HOST:PORT for /metrics, /healthz and /readyz, or none")
    log_format: Literal["text", "json"] = Field(default="text", description="how lines on standard error are written")
    insecure: bool = Field(
        default=False, description="listen where other machines reach it, although nobody is asked who he is"
    )
    supervised: bool = Field(
        default=False, description="end when standard input ends, so as never to outlive who started it"
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, le=86_400, description="what running calls are given when it is to end"
    )

    @model_validator(mode="after")
    def _listens_in_private(self) -> Self:
        if not self.insecure and not is_private(self.listen):
            raise ValueError(
                f"listen is {self.listen}: other machines reach that, and there are no keys and no TLS yet; --insecure "
                "allows it where the network itself keeps strangers out"
            )
        return self


class WorkerSettings(RoleSettings):
    """What an encoder and a decoder can both be told."""

    model: str = Field(description="digits, the folder of a checkpoint, or a hub name (owner/name)")
    name: str | None = Field(
        default=None, min_length=1, description="what requests call the model; default: as it is found"
    )
    arena: Path = Field(description="the shared-memory region of this node")
    arena_bytes: ByteSize | None = Field(
        default=None, gt=0, description="makes the region this large if it is not there"
    )
    workers_secret_file: Path = Field(description="64 hex digits that all workers of a fleet share, in a file of 0600")
    device: str = Field(default="cpu", description="where the model runs, as torch names it: cpu, cuda, cuda:1")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = Field(
        default=None, description="what it computes in; default: float32 on a CPU, else the checkpoint's own"
    )


def read_secret(path: Path) -> bytes:
    """The 32 bytes that a file holds as 64 hex digits.

    Raises SettingsError for a file that cannot be read, that others than its owner may read, or that holds anything
    else. What it holds is never shown.
    """
    where = str(path)
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1024).strip()
    except OSError as error:
        raise SettingsError(
            f"a secret cannot be read: {error.strerror}", where, f"openssl rand -hex 32 > {path} && chmod 600 {path}"
        ) from None
    if mode & 0o077:
        raise SettingsError(f"a secret has mode {mode:04o}: others may use it", where, f"chmod 600 {path}")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise SettingsError(
            f"a secret must be 64 hex digits, the file has {len(text)} characters",
            where,
            f"openssl rand -hex 32 > {path}",
        )
    return bytes.fromhex(text)


# -- reading -----------------------------------------------------------------------------------------------------------


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
        value = "what was given" if secret else ascii(problem["input"])[:160]
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
