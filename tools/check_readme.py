"""Says whether the commands that README.md and the pages under docs/ show exist.

A command is a line that begins with `$ ` inside a fenced `console` block. It must be a target of the Makefile, a verb
of the installed `chiasm` whose `--help` works, a module that `python -m` finds, or a tool the reader brings (`docker`).
Flags of `chiasm` and of the roles must be ones that `--help` lists. With `--run` the cheap commands, which neither
install nor serve, are also carried out.

    python -m tools.check_readme [--run] [FILE…]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"^([a-z][a-z0-9-]*):", re.MULTILINE)
# Programs this repository does not own: that they are spelt right is all that can be said here.
BROUGHT = {"docker", "kubectl", "git", "cd", "pip", "python3", "export", "source", ".", "openssl", "chmod"}
ROLES = {"encoder_service", "decoder_service", "router"}
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
        if found and name in ROLES:
            return _unlisted((str(binaries / "python"), "-m", name), words[3:])
        return None if found else f"no such module: {name}"
    if program == "chiasm":
        # Verbs may have verbs of their own; arguments between them and `--help` do no harm.
        verbs = itertools.takewhile(lambda word: not word.startswith("-"), words[1:])
        return _unlisted((str(binaries / "chiasm"), *verbs), words[1:])
    if program in BROUGHT or (binaries / program).exists() or ("/" in words[0] and (ROOT / words[0]).is_file()):
        return None
    return "neither a target, a verb, a module nor a tool of this environment"


@cache
def _help(command: tuple[str, ...]) -> tuple[int, str]:
    # Wide, or the flags of a narrow terminal are cut.
    done = subprocess.run(
        [*command, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "250", "TERMINAL_WIDTH": "250"},
    )
    return done.returncode, done.stdout


def _unlisted(command: tuple[str, ...], words: list[str]) -> str | None:
    """What is wrong with the flags among `words`, by what the command says of itself."""
    status, text = _help(command)
    if status:
        return f"`{Path(command[0]).name} {' '.join(command[1:])} --help` exits {status}"
    known = set(re.findall(r"--[a-z][a-z-]*", text))
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"no such flag: {', '.join(unknown)}" if unknown else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))])
    parser.add_argument("--run", action="store_true", help="carry out the cheap commands as well")
    options = parser.parse_args()
    binaries = Path(sys.executable).parent
    targets = set(TARGET.findall((ROOT / "Makefile").read_text()))
    sys.path.insert(0, str(ROOT))
    count = faults = 0
    for file in options.files:
        for words in commands(file.read_text()):
            count += 1
            found = fault(words, targets, binaries)
            if found is None and options.run and tuple(words[:2]) in CHEAP:
                program = [str(binaries / words[0])] if words[0] == "chiasm" else [words[0]]
                done = subprocess.run([*program, *words[1:]], cwd=ROOT, capture_output=True, timeout=600, check=False)
                found = f"exits {done.returncode}" if done.returncode else None
            if found:
                faults += 1
                print(f"{file.name}: {shlex.join(words)}: {found}", file=sys.stderr)
    if count == 0:
        print("no command is shown", file=sys.stderr)
        return 1
    print(f"{count} commands, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
