"""Grammars as callers write them, to the notation that guides are compiled from.

Callers write the EBNF that llama.cpp made common (its `grammars/README.md`): rules `name ::= ...` from `root` on, with
"literals", [classes], groups, `.`, `|`, `* + ? {n} {n,} {n,m}`, and comments from `#` on. What is compiled is the Lark
of llguidance (its `docs/syntax.md`), where terminals, in capitals, are regular expressions of the lexer, and rules are
for the parser. Everything that does not lead back to itself becomes a terminal, and so does every run of such things
in a rule that does: a grammar without recursion is one regular expression, followed exactly. Elsewhere the lexer reads
each terminal as far as it goes.

It knows text alone: no tokens, and nothing of the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

NESTED = 64
"""Groups within groups. Reading them is a recursion."""

REPEATED = 10_000
"""The largest number in braces."""

EXPANDED = 1 << 22
"""Characters of the expression that a rule without recursion stands for, with all that it names written out. Rules that
name another twice, and so on, are short to write and beyond any compiler."""

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_INLINE_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_COUNT = re.compile(r"\{[ \t]*([0-9]{1,9})[ \t]*(,[ \t]*([0-9]{1,9})?[ \t]*)?\}")
_ESCAPE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\"\\\[\]^/-])|([nrt])", re.ASCII)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_PLAIN = re.compile(r"[A-Za-z0-9 ]")


class NotAGrammar(ValueError):
    """Text that is no grammar. The message is for people, and goes on from the grammar's name."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """A literal or a class of characters, in Lark."""

    lark: str


@dataclass(frozen=True, slots=True)
class Reference:
    name: str


@dataclass(frozen=True, slots=True)
class Several:
    """Parts one after the other, or one of them."""

    kind: Literal["all", "one"]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    part: Part
    times: str


Part: TypeAlias = Terminal | Reference | Several | Repeated


def to_lark(text: str) -> str:
    """Raises NotAGrammar, with the line and the column of what is wrong."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise NotAGrammar("has no rule root")
    for name, part in rules.items():
        for other in sorted(_names(part)):
            if other not in rules:
                raise NotAGrammar(f"has no rule {other[:80]}, which {name[:80]} names")
    return _Writer(rules).written()


class _Reader:
    """Reads rules from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Part]:
        rules: dict[str, Part] = {}
        self._skip(_SPACE)
        while self._at < len(self._text):
            name = self._name()
            if name in rules:
                raise self._wrong(f"the rule {name[:80]} is there twice")
            self._skip(_INLINE_SPACE)
            if not self._took("::="):
                raise self._wrong("::= is missing")
            self._skip(_SPACE)
            rules[name] = self._one(_INLINE_SPACE)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._wrong("what stands here belongs to no rule")
            self._skip(_SPACE)
        return rules

    def _one(self, space: re.Pattern[str]) -> Part:
        """Alternatives. A rule ends with its line unless the next begins after a bar; a group with its bracket."""
        parts = [self._all(space)]
        while self._took("|"):
            self._skip(_SPACE)
            parts.append(self._all(space))
        return parts[0] if len(parts) == 1 else Several("one", tuple(parts))

    def _all(self, space: re.Pattern[str]) -> Part:
        parts: list[Part] = []
        while (part := self._part(space)) is not None:
            self._skip(space)
            if (times := self._times()) is not None:
                part = Repeated(part, times)
                self._skip(space)
            parts.append(part)
        return parts[0] if len(parts) == 1 else Several("all", tuple(parts))

    def _part(self, space: re.Pattern[str]) -> Part | None:
        if self._took('"'):
            return Terminal(f'"{self._until(chr(34), _in_literal)}"')
        if self._took("["):
            negated = "^" if self._took("^") else ""
            inside = self._until("]", _in_class)
            if not inside and not negated:
                raise self._wrong("a class holds no character")
            # Without any, all but none.
            return Terminal(f"/[{negated}{inside}]/" if inside else "/(?s:.)/")
        if self._took("."):
            return Terminal("/(?s:.)/")
        if self._took("("):
            self._depth += 1
            if self._depth > NESTED:
                raise self._wrong(f"groups are nested more than {NESTED} deep")
            self._skip(_SPACE)
            part = self._one(_SPACE)
            if not self._took(")"):
                raise self._wrong("a bracket is not closed")
            self._depth -= 1
            return part
        if _NAME.match(self._text, self._at):
            return Reference(self._name())
        return None

    def _times(self) -> str | None:
        for sign in "*+?":
            if self._took(sign):
                return sign
        if match := _COUNT.match(self._text, self._at):
            least, comma, most = match.groups()
            if max(int(least), int(most or 0)) > REPEATED:
                raise self._wrong(f"something is repeated more than {REPEATED} times")
            if most is not None and int(most) < int(least):
                raise self._wrong("something is repeated at most less often than at least")
            self._at = match.end()
            return f"{{{int(least)},{int(most) if most else ''}}}" if comma else f"{{{int(least)},{int(least)}}}"
        return None

    def _until(self, end: str, written: Callable[[str], str]) -> str:
        """The characters up to `end`, written for Lark."""
        out: list[str] = []
        while not self._took(end):
            if self._at >= len(self._text) or self._text[self._at] in "\r\n":
                raise self._wrong(f"{end} is missing")
            if end == "]" and self._text[self._at] == "-" and out and self._text[self._at + 1 : self._at + 2] != "]":
                out.append("-")
                self._at += 1
            else:
                out.append(written(self._character()))
        return "".join(out)

    def _character(self) -> str:
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        match = _ESCAPE.match(self._text, self._at)
        if match is None:
            raise self._wrong("an escape is not known")
        self._at = match.end()
        *digits, same, named = match.groups()
        if same or named:
            return same or _NAMED[named]
        code = int(next(filter(None, digits)), 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._wrong("an escape is no character")
        return chr(code)

    def _name(self) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._wrong("a name is missing")
        self._at = match.end()
        return match.group()

    def _took(self, what: str) -> bool:
        if not self._text.startswith(what, self._at):
            return False
        self._at += len(what)
        return True

    def _skip(self, space: re.Pattern[str]) -> None:
        match = space.match(self._text, self._at)
        assert match is not None, "no space is space enough"
        self._at = match.end()

    def _wrong(self, what: str) -> NotAGrammar:
        line = self._text.count("\n", 0, self._at) + 1
        column = self._at - self._text.rfind("\n", 0, self._at)
        return NotAGrammar(f"cannot be read at line {line}, column {column}: {what}")


class _Writer:
    """Writes every part that has parts as a definition of its own, so that nothing is nested."""

    def __init__(self, rules: Mapping[str, Part]) -> None:
        self._rules = rules
        self._parsed = _recursive(rules)
        self._names = {name: f"{'r' if name in self._parsed else 'R'}_{i}" for i, name in enumerate(rules)}
        self._lines: list[str] = []

    def written(self) -> str:
        reached = {"root"}
        waiting = ["root"]
        while waiting:
            name = waiting.pop()
            self._lines.append(f"{self._names[name]}: {self._inside(self._rules[name])}")
            waiting += (more := _names(self._rules[name]) - reached)
            reached |= more
        return "\n".join([f"start: {self._names['root']}", *self._lines, ""])

    def _name_of(self, part: Part) -> str:
        """What stands for a part within another."""
        if isinstance(part, Terminal):
            return part.lark
        if isinstance(part, Reference):
            return self._names[part.name]
        name = f"{'p' if self._is_parsed(part) else 'P'}_{len(self._lines)}"
        self._lines.append("")  # its place: what it holds is written meanwhile
        at = len(self._lines) - 1
        self._lines[at] = f"{name}: {self._inside(part)}"
        return name

    def _inside(self, part: Part) -> str:
        if isinstance(part, Repeated):
            return self._name_of(part.part) + part.times
        if isinstance(part, Several) and part.kind == "one":
            return " | ".join(map(self._name_of, part.parts))
        if isinstance(part, Several):
            return " ".join(map(self._name_of, self._joined(part.parts))) or '""'
        return self._name_of(part)

    def _joined(self, parts: tuple[Part, ...]) -> list[Part]:
        """Parts of a sequence, with those of the lexer that stand side by side as one, unless all are."""
        if not any(map(self._is_parsed, parts)):
            return [*parts]
        joined: list[Part] = []
        run: list[Part] = []
        for part in parts:
            if self._is_parsed(part):
                joined += [*_whole(run), part]
                run = []
            else:
                run.append(part)
        return [*joined, *_whole(run)]

    def _is_parsed(self, part: Part) -> bool:
        return not self._parsed.isdisjoint(_names(part))


def _whole(run: list[Part]) -> list[Part]:
    return run if len(run) < 2 else [Several("all", tuple(run))]


def _names(part: Part) -> set[str]:
    """The rules that a part names."""
    if isinstance(part, Reference):
        return {part.name}
    if isinstance(part, Repeated):
        return _names(part.part)
    return set().union(*map(_names, part.parts)) if isinstance(part, Several) else set()


def _recursive(rules: Mapping[str, Part]) -> set[str]:
    """The rules that lead to themselves, or to one that does. Raises NotAGrammar for others beyond `EXPANDED`."""
    named = {name: _names(part) for name, part in rules.items()}
    namers: dict[str, list[str]] = {name: [] for name in rules}
    for name, others in named.items():
        for other in others:
            namers[other].append(name)
    # Those that name none but finished ones are finished; who is left goes round.
    left = {name: len(others) for name, others in named.items()}
    finished = [name for name, count in left.items() if not count]
    sizes: dict[str, int] = {}
    for name in finished:
        sizes[name] = _expanded(rules[name], sizes)
        if sizes[name] > EXPANDED:
            raise NotAGrammar(f"is too large: {name[:80]} stands for more than {EXPANDED} characters")
        for namer in namers[name]:
            left[namer] -= 1
            if not left[namer]:
                finished.append(namer)
    return set(rules) - set(finished)


def _expanded(part: Part, sizes: Mapping[str, int]) -> int:
    if isinstance(part, Terminal):
        return len(part.lark)
    if isinstance(part, Reference):
        return sizes[part.name]
    return _expanded(part.part, sizes) if isinstance(part, Repeated) else sum(_expanded(p, sizes) for p in part.parts)


def _in_literal(character: str) -> str:
    return character if _PLAIN.match(character) or ord(character) > 0xFF else f"\\u{ord(character):04x}"


def _in_class(character: str) -> str:
    return character if _PLAIN.match(character) else f"\\u{{{ord(character):x}}}"
