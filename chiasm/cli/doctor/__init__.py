"""`chiasm doctor`: looks at this machine and says what is missing, and what mends it.

Nothing is changed, nothing is asked of the network, and no library of models is loaded. What is looked at is in
`software`, `media` and `machine`; here it is put in order and told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from chiasm import __version__
from chiasm.cli.doctor import machine, media, software
from chiasm.cli.doctor.finding import Check, Finding, Status

_EXIT = {Status.OK: 0, Status.WARN: 1, Status.FAIL: 2}
CHECKS: tuple[Check, ...] = (*software.CHECKS, *media.CHECKS, *machine.CHECKS)


def run(*, as_json: bool, checks: Sequence[Check] = CHECKS) -> int:
    """The command. Returns the exit code: 0, 1 for warnings, 2 for failures."""
    findings = examine(checks)
    worst = max((_EXIT[finding.status] for finding in findings), default=0)
    if as_json:
        print(json.dumps({"version": __version__, "exit": worst, "checks": [asdict(finding) for finding in findings]}))
    else:
        print("\n".join(lines(findings)))
    return worst


def examine(checks: Sequence[Check]) -> list[Finding]:
    """Looks at everything, side by side: some of it waits for processes."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(lambda check: check(), checks))


def lines(findings: Sequence[Finding]) -> list[str]:
    """The findings for people, by group: what is well in a line, what is not in three."""
    told = [f"chiasm {__version__} · doctor"]
    group = ""
    for finding in findings:
        if finding.group != group:
            group = finding.group
            told.append(group)
        told.append(f"  {finding.status:<5} {finding.name:<14} {finding.found}")
        if finding.status is not Status.OK:
            told += [f"        expected       {finding.expected}", f"        fix            {finding.fix}"]
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    told.append(f"{counts[Status.OK]} ok, {counts[Status.WARN]} warnings, {counts[Status.FAIL]} failures")
    return told
