"""The wall clock of a process, set forward or back while it runs.

Where libfaketime is installed the C library's clock is shifted, gRPC's and the decoders' too; elsewhere that of Python
(`shifted_clock`), whose deadlines and time stamps those of a role are. Monotonic clocks are left alone, as NTP and
operators leave them alone.
"""

from __future__ import annotations

import glob
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Final

from tests.faults.injectors import proved, proved_soon
from tests.processes import Role

LIBRARY: Final = next(
    iter(
        [os.environ["LIBFAKETIME"]]
        if "LIBFAKETIME" in os.environ
        else glob.glob("/usr/lib/*/faketime/libfaketime.so.1") + glob.glob("/usr/lib/faketime/libfaketime.so.1")
    ),
    None,
)
"""libfaketime, of the system or where `LIBFAKETIME` says."""


class Clock:
    """The clock of a role, which is started (again) under it and then runs right until it is `shift`ed.

    As an injector it shifts by `seconds`, and back at the end; the role goes on.
    """

    def __init__(
        self,
        role: Role,
        folder: Path,
        seconds: float = 3600.0,
        *,
        library: str | None = LIBRARY,
        patience: float = 10.0,
    ) -> None:
        self._role = role
        self._file = folder / f"clock-{role.role}"
        self._seconds = seconds
        self._library = library
        self._patience = patience

    def prepare(self) -> None:
        """Puts the clock under the role, which must not run, or is started again."""
        self.shift(0.0)
        if self._library:
            self._role.env |= {
                "LD_PRELOAD": self._library,
                "FAKETIME_TIMESTAMP_FILE": str(self._file),
                "FAKETIME_NO_CACHE": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        else:
            self._role.through("tests.faults.injectors.shifted_clock", str(self._file))

    def to(self, seconds: float) -> Clock:
        """The same, which shifts by so much."""
        self._seconds = seconds
        return self

    def shift(self, seconds: float) -> None:
        """Sets it to so much beside the truth, at once."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+.0f}\n")
        new.replace(self._file)

    def inject(self) -> None:
        self.shift(self._seconds)

    def verify(self) -> None:
        """The role's log tells the time. It must have had reason to log since."""
        proved_soon(
            lambda: abs(self.told() - self._seconds) < 60,
            f"the clock of {self._role.role} is right",
            seconds=self._patience,
        )

    def told(self) -> float:
        """Seconds by which the last line of the role's log is beside the truth, and the line's own age."""
        events = self._role.events()
        proved(events, f"{self._role.role} has logged nothing")
        return datetime.fromisoformat(events[-1]["timestamp"]).timestamp() - time.time()

    def end(self) -> None:
        self.shift(0.0)
