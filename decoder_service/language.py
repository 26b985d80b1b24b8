"""What may be answered, as a caller says it: checked, and written as a grammar of llguidance.

It knows no tokens. The library's own words about a grammar are for those who write that library: a caller is told in
ours what is wrong, and where, as far as it is known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from chiasm.errors import Fact, InvalidRequest
from chiasm.rpc.limits import GUIDE_BYTES, GUIDE_CHOICES
from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service.ebnf import NotAGrammar, to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Kind: TypeAlias = Literal["json_schema", "regex", "grammar", "choice"]

_JSON: Final[JsonCompileOptions] = {
    # Between two tokens of JSON: a space as on one line, or a new line and its indentation. Unbounded, it is where a
    # model that has nothing more to say goes on for ever.
    "whitespace_pattern": r"(?: |\n(?: {0,32}|\t{0,8}))?",
    # What is not understood is refused, whatever the schema itself says in `x-guidance`.
    "lenient": False,
    "coerce_one_of": False,
}

_TOO_MUCH = re.compile(r"fuel|too (?:many|big|large|deep|complex)|limit|max is|nested|TooComplex", re.IGNORECASE)
_KEYWORD = re.compile(r'Unimplemented keys: \["([^"\\]{1,80})"')
_KEYWORDS = {"oneOf constraints": "oneOf", "Unknown format": "format", "Resource '": "$ref"}
"""Keywords that the library refuses in other words: alternatives that overlap, a format it does not know, and a schema
that lies elsewhere. It fetches nothing."""


class Language(NamedTuple):
    """What bounds an answer. Equal ones are compiled once.

    Attributes:
        text: a JSON schema, a regular expression, or a grammar in EBNF; one string.
            Of a choice: the strings.
    """

    kind: Kind
    text: tuple[str, ...]

    def refused(self, what: str, facts: dict[str, Fact] | None = None) -> InvalidRequest:
        """SCHEMA_INVALID. `what` goes on from the guide's name."""
        facts = {"field": self.kind} | (facts or {})
        return InvalidRequest("SCHEMA_INVALID", f"{self.kind} {what}", item=self.kind, facts=facts)


def read_guide(guide: pb.Guide) -> Language:
    """Raises InvalidRequest FIELD_MISSING for a guide that says nothing, FIELD_OUT_OF_RANGE for one that is too large
    and for choices that are none."""
    match guide.WhichOneof("guide"):
        case "json_schema":
            return _bounded("json_schema", [guide.json_schema])
        case "regex":
            return _bounded("regex", [guide.regex])
        case "grammar":
            return _bounded("grammar", [guide.grammar])
        case "choice":
            if not 0 < (count := len(guide.choice.choices)) <= GUIDE_CHOICES:
                raise InvalidRequest.out_of_range("choice", count, f"1 to {GUIDE_CHOICES} strings", "choice")
            for string in guide.choice.choices:
                if not string:
                    raise InvalidRequest.out_of_range("choice", string, "strings that are not empty", "choice")
            return _bounded("choice", guide.choice.choices)
        case None:
            raise InvalidRequest("FIELD_MISSING", "the guide says nothing", item="guide", facts={"field": "guide"})


def _bounded(kind: Kind, strings: Sequence[str]) -> Language:
    size = sum(len(string.encode()) for string in strings)
    if size > GUIDE_BYTES:
        raise InvalidRequest.out_of_range(kind, size, f"at most {GUIDE_BYTES} bytes", kind)
    return Language(kind, tuple(strings))


def to_grammar(language: Language) -> str:
    """A grammar for `LLMatcher`. Raises InvalidRequest SCHEMA_INVALID for what cannot be read; `explained` has the
    rest."""
    from llguidance import LLMatcher  # an extra: who has it not was told so before

    (text, *_) = language.text
    if language.kind == "json_schema":
        try:
            return LLMatcher.grammar_from_json_schema(_schema(language), overrides=_JSON)
        except ValueError as error:  # Python's reader of JSON takes more
            raise explained(language, str(error)) from None
    if language.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if language.kind == "grammar":
        try:
            return LLMatcher.grammar_from_lark(to_lark(text))
        except NotAGrammar as error:
            raise language.refused(str(error)) from None
    return LLMatcher.grammar_from_regex("|".join(map(_literally, language.text)))


def explained(language: Language, words: str) -> InvalidRequest:
    """Why the library takes no grammar made of `language`, from its `words`."""
    for sign, keyword in [*_KEYWORDS.items(), *((match[0], match[1]) for match in _KEYWORD.finditer(words))]:
        if sign in words:
            return language.refused(f"uses {keyword} in a way that is not followed here", {"keyword": keyword})
    if "Unsatisfiable" in words or "NoExtension" in words:
        return language.refused("allows no answer")
    if _TOO_MUCH.search(words):
        return language.refused("is too large or too deep to be followed")
    if language.kind == "regex":
        return language.refused(
            "is no regular expression that can be followed (look-around and back references cannot)"
        )
    return language.refused("cannot be followed: it is not valid")


def _schema(language: Language) -> str:
    """Its text, an object of JSON."""
    try:
        schema = json.loads(language.text[0])
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise language.refused(f"is no JSON at {where}", {"line": error.lineno, "column": error.colno}) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of brackets
        raise language.refused("is too large or too deep to be followed") from None
    if schema is False:
        raise language.refused("allows no answer")
    if not isinstance(schema, dict | bool):
        raise language.refused("is no object")
    return language.text[0] if isinstance(schema, dict) else "{}"


def _literally(string: str) -> str:
    """A regular expression of this string alone."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in string)
