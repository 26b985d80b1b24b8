"""Says whether the commands that README.md shows exist.

A command is a line that begins with `$ ` inside a fenced `console` block. It must be a target of the Makefile, a verb
of the installed `chiasm` whose `--help` works, a module that `python -m` finds, or a tool the reader brings (`docker`).
With `--run` the cheap ones, which neither install nor serve, are also carried out.

    python -m tools.check_readme [--run] [FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"^([a-z][a-z0-9-]*):", re.MULTILINE)
# Programs this repository does not own: that they are spelt right is all that can be said here.
BROUGHT = {"docker", "git", "cd", "pip", "python3", "export", "source", "."}
CHEAP = {("chiasm", "--version"), ("chiasm", "doctor"), ("chiasm", "demo"), ("make", "help")}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command shown in `text`; comments and assignments before it are left out.

    Raises:
        ValueError: a command has an open quotation.
    """
    for block in BLOCK.findall(text):
        joined = re.sub(r"\\\n\s*", " ", block)
        for line in joined.splitlines():
            if not line.startswith("$ "):
                continue
            # Operators are words of their own here; inside quotation marks they are text.
            lexer = shlex.shlex(line[2:], posix=True, punctuation_chars="|&;")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word in {"|", "&&", "||", ";", "&"}:
                    if words:
                        yield words
                    words = []
                elif words or not re.fullmatch(r"\w+=.*", word):
                    words.append(word)


def fault(words: list[str], targets: set[str], binaries: Path) -> str | None:
    """What is wrong with a command, or None.

    Args:
        words: the command, split.
        targets: names the Makefile knows.
        binaries: folder of the environment's programs.
    """
    program = Path(words[0]).name
    if program == "make":
        unknown = [word for word in words[1:] if "=" not in word and not word.startswith("-") and word not in targets]
        return f"no such target: {', '.join(unknown)}" if unknown else None
    if program == "python" and words[1:2] == ["-m"]:
        name = words[2]
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        return None if found else f"no such module: {name}"
    if program == "chiasm":
        verb = [word for word in words[1:2] if not word.startswith("-")]
        result = subprocess.run(
            [binaries / "chiasm", *verb, "--help"], capture_output=True, text=True, timeout=120, check=False
        )
        return None if result.returncode == 0 else f"`chiasm {' '.join(verb)} --help` exits {result.returncode}"
    if program in BROUGHT or (binaries / program).exists():
        return None
    return "neither a target, a verb, a module nor a tool of this environment"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "README.md")
    parser.add_argument("--run", action="store_true", help="carry out the cheap commands as well")
    options = parser.parse_args()
    binaries = Path(sys.executable).parent
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))
    sys.path.insert(0, str(ROOT))
    count = faults = 0
    for words in commands(options.file.read_text()):
        count += 1
        found = fault(words, targets, binaries)
        if found is None and options.run and tuple(words[:2]) in CHEAP:
            program = [str(binaries / words[0])] if words[0] == "chiasm" else [words[0]]
            done = subprocess.run([*program, *words[1:]], cwd=ROOT, capture_output=True, timeout=600, check=False)
            found = f"exits {done.returncode}" if done.returncode else None
        if found:
            faults += 1
            print(f"{options.file.name}: {shlex.join(words)}: {found}", file=sys.stderr)
    if count == 0:
        print(f"{options.file.name} shows no command", file=sys.stderr)
        return 1
    print(f"{options.file.name}: {count} commands, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
