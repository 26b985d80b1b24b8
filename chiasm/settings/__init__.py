"""How a process runs: one model per role, filled from flags, environment and file, in this order of precedence.

A role's settings are a subclass of `RoleSettings`, a worker's of `WorkerSettings`. `load` alone reads the command line
and the environment; settings that a program makes itself (`EncoderSettings(model=…)`) read nothing. What the values
mean to torch, gRPC or a store is not known here.
"""

from __future__ import annotations

from chiasm.settings.kinds import Address, HttpAddress, RedisUrl, Target, Targets, is_private
from chiasm.settings.reading import load
from chiasm.settings.refusal import SettingsError, three_lines
from chiasm.settings.roles import RoleSettings, Settings, SharedStoreSettings, WorkerSettings
from chiasm.settings.secret import read_password, read_secret

__all__ = [
    "Address",
    "HttpAddress",
    "RedisUrl",
    "RoleSettings",
    "Settings",
    "SettingsError",
    "SharedStoreSettings",
    "Target",
    "Targets",
    "WorkerSettings",
    "is_private",
    "load",
    "read_password",
    "read_secret",
    "three_lines",
]
