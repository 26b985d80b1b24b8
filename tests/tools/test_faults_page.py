"""docs/faults.md names tests and injectors: each exists, and so does each point that its failpoints name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from chiasm.failpoints import POINTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text("utf-8")
INJECTORS = sorted((ROOT / "tests" / "faults" / "injectors").glob("*.py"))


def defined(path: Path) -> set[str]:
    """Names of functions and classes of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, kinds)}


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE))))
def test_a_test_that_is_named_exists(named: tuple[str, str]) -> None:
    file, test = named
    assert (ROOT / file).is_file()
    assert not test or test in defined(ROOT / file)


def test_every_injector_is_on_the_page_and_has_a_control() -> None:
    classes = {name for file in INJECTORS for name in defined(file) if name[0].isupper()}
    injectors = classes - {"NoEffect", "Injector", "Namespace"}
    control = (ROOT / "tests" / "faults" / "test_injectors.py").read_text("utf-8")
    for name in injectors:
        assert f"`{name}`" in PAGE, name
        assert re.search(rf"\b{name}\(", control), name


def test_every_row_that_a_test_claims_is_on_the_page() -> None:
    for file in (ROOT / "tests" / "faults").glob("test_*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for row in re.findall(r"\bM\d+\b", ast.get_docstring(node) or ""):
                    line = next((line for line in PAGE.splitlines() if line.startswith(f"| {row} ")), "")
                    assert not line or node.name in line or "test_leaving" in file.name, (row, node.name)


def test_the_points_that_are_documented_are_those_there_are() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text("utf-8")
    section = operations[operations.index("## Failpoints") :].split("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z]+\.[a-z-]+)` \|", section, re.MULTILINE)) == set(POINTS)
