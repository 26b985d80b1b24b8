"""`python -m chiasm.tied PARENT MODULE ARGUMENTS…`: runs a module in a process that does not outlive who started it.

The kernel kills it (SIGKILL) when its parent ends, however that ends, and also when it is stopped itself. This is for a
parent that has been given the process's device: whoever is given that next must find it free. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def tie(parent: int) -> None:
    """Ties this process to its parent. Ends it if the parent is not `parent` any more.

    The kernel goes by the thread that started the process: that has to live as long as the parent.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:  # it ended before it was asked for
        os._exit(1)


if __name__ == "__main__":
    tie(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
