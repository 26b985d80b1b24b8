"""What is told of settings with which a process cannot start."""

from __future__ import annotations

from functools import partial
from typing import Self

from chiasm.errors import ChiasmError


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
