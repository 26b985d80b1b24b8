"""Memory that is freed is kept: a process that takes and frees megabytes again and again gets no new pages for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
import numpy as np
from chiasm.allocation import keep_freed
assert not {keep} or keep_freed()
def use():
    for _ in range(50):
        np.ones(8 << 20, dtype=np.uint8)
        np.ones(3 << 20, dtype=np.uint8)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, keep: bool) -> int:
    """Pages that the system hands out while some hundred megabytes are taken and freed."""
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keep=keep)],
        capture_output=True,
        text=True,
        check=True,
        env={"MALLOC_TRIM_THRESHOLD_": "131072"},  # glibc would else raise its own bounds while it runs, or not
    )
    return int(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_what_is_freed_is_kept() -> None:
    # Each of a hundred pieces is at least one page, however large the system makes its pages.
    assert faults(keep=False) >= 100 > 50 > faults(keep=True)
