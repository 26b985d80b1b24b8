"""The check of the README's commands finds them, and finds the wrong ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.check_readme import commands, fault

TEXT = """
Text with $ make nothing outside of any block.

```console
$ make demo                       # sets everything up
chiasm 0.1.0 · demo
$ CHIASM_TARGET=localhost:1 chiasm ask "What | happens?" \\
    clip.mp4
$ docker compose up --wait && chiasm doctor
```

```python
$ make nothing
```
"""


def test_commands_are_the_prompt_lines_of_console_blocks() -> None:
    found = list(commands(TEXT))
    assert found[0] == ["make", "demo"]
    assert found[1] == ["chiasm", "ask", "What | happens?", "clip.mp4"]
    assert found[2:] == [["docker", "compose", "up", "--wait"], ["chiasm", "doctor"]]


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["make", "test"], True),
        (["make", "test", "PYTEST_ARGS=tests/rpc"], True),
        (["make", "tset"], False),
        (["python", "-m", "tools.check_readme"], True),
        ([".venv/bin/python", "-m", "tools.no_such_module"], False),
        (["python", "-m", "no_such_package.module"], False),
        (["docker", "compose", "up"], True),
        (["pytest", "tests"], True),
        (["chiasm-no-such-program"], False),
        (["chiasm", "serve", "digits", "--listen", "127.0.0.1:0"], True),
        (["chiasm", "serve", "digits", "--listne", "127.0.0.1:0"], False),
        (["chiasm", "no-such-verb"], False),
        (["python", "-m", "router", "--encoders=127.0.0.1:1"], True),
        (["python", "-m", "router", "--no-such-flag"], False),
    ],
)
def test_a_command_that_does_not_exist_is_a_fault(words: list[str], right: bool) -> None:
    found = fault(words, {"test", "demo"}, Path(sys.executable).parent)
    assert (found is None) == right
