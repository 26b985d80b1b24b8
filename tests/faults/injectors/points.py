"""Failpoints of the product (`chiasm.failpoints`), in a process that is started again with them."""

from __future__ import annotations

from chiasm.failpoints import EXIT_CODE
from tests.faults.injectors import PATIENCE, proved_soon
from tests.processes import Role


class Points:
    """Faults at points of a role, from its restart to its next one.

    `inject` returns when it is ready: that a point was reached is proved (`verify`) when something had reason to.
    """

    def __init__(self, role: Role, faults: str, *, seconds: float = PATIENCE) -> None:
        self._role = role
        self._faults = faults
        self._seconds = seconds

    def inject(self) -> None:
        self._role.env["CHIASM_FAILPOINTS"] = self._faults
        self._again()

    def verify(self) -> None:
        """One of the faults has happened; if it was an exit, the process has ended by it."""
        proved_soon(lambda: self._role.event("failpoint"), f"{self._faults} did not happen", seconds=self._seconds)
        happened = self._role.event("failpoint") or {}
        if happened["action"] == "exit":
            proved_soon(lambda: self._role.code == EXIT_CODE, f"{self._role.role} did not end by it", seconds=10)

    def end(self) -> None:
        """The role runs again, without faults."""
        self._role.env.pop("CHIASM_FAILPOINTS", None)
        self._again()

    def _again(self) -> None:
        if self._role.code is None:
            self._role.kill()
        self._role.start()
        self._role.wait_for("ready")
