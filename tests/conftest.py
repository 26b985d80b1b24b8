"""What every test is given. One is skipped only where it names what the machine lacks: CUDA, or what a fault takes."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# The machines are shared: an example that was slow this time says nothing.
settings.register_profile("chiasm", deadline=None)
settings.load_profile("chiasm")

# A shell that runs the suite in the background has it ignore Ctrl-C, and what it starts would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cancels", type=int, default=3000, help="calls that are cancelled at a store that nodes share")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips what is marked `gpu` where no CUDA device answers. torch is loaded only if such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
