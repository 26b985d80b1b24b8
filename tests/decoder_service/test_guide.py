"""Languages as guides: what each allows, token by token, and what is refused, within which limits."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from chiasm.errors import ChiasmError, InvalidRequest, ServerError, Unsupported
from chiasm.models.family import Prompt
from chiasm.models.registry import Model, find
from chiasm.rpc.limits import GUIDE_BYTES
from decoder_service.guide import KEPT, Guide, Guides
from decoder_service.language import Kind, Language

VOCABULARY = 447


@cache
def prompt() -> Prompt:
    return Model(find("digits")).prompt()


def guides() -> Guides:
    return Guides(prompt(), VOCABULARY, seconds=120.0)  # what is refused here is refused for its size


def started(kind: Kind, *text: str, of: Guides | None = None) -> Guide:
    async def start() -> Guide:
        return await (of or guides()).start(Language(kind, text), prompt().stop_ids)

    return asyncio.run(start())


def refused(kind: Kind, *text: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        started(kind, *text)
    error = caught.value
    assert (error.reason, error.item, error.facts["field"]) == ("SCHEMA_INVALID", kind, kind)
    assert len(error.message) < 300
    return error


def allowed(guide: Guide) -> set[int]:
    bits = np.full(-(-VOCABULARY // 8), 0xAA, dtype=np.uint8)
    guide.fill(bits)
    return set(np.flatnonzero(np.unpackbits(bits, count=VOCABULARY, bitorder="little")).tolist())


def took(guide: Guide, text: str) -> bool:
    """Goes along `text` as it is tokenised, as far as that is allowed."""
    for token in prompt().text(text):
        if token not in allowed(guide):
            return False
        guide.accept(token)
    return True


def takes(kind: Kind, text: str, whole: str) -> bool:
    """Whether `whole` is of the language."""
    guide = started(kind, text)
    return took(guide, whole) and guide.may_end


# -- what may come -----------------------------------------------------------------------------------------------------


def test_the_tokens_allowed_are_those_whose_bytes_may_come_next() -> None:
    # Of this language every string has a completion exactly if it matches the pattern beside it.
    guide, beginning = started("regex", "[a-m ]{0,5}[0-9]{2}"), re.compile(rb"[a-m ]{0,5}[0-9]{0,2}")
    text = b""
    for following in (b"a", b" ", b"c", b"4", b"2"):
        expected = {
            token
            for token in range(VOCABULARY)
            if (own := prompt().token_bytes(token)) and beginning.fullmatch(text + own)
        }
        assert allowed(guide) == expected
        assert not guide.may_end
        (token,) = prompt().text(following.decode())
        guide.accept(token)
        text += following
    assert guide.may_end and guide.ended and allowed(guide) == prompt().stop_ids


def test_the_end_is_allowed_exactly_where_the_language_allows_it() -> None:
    guide = started("regex", "a(bc)*")
    for character, may_end in zip("abcbc", [True, False, True, False, True], strict=True):
        assert took(guide, character)
        assert guide.may_end == may_end == (prompt().stop_ids <= allowed(guide))
        assert not guide.ended
    guide.accept(next(iter(prompt().stop_ids)))


def test_a_replayed_guide_goes_on_as_the_one_that_drew() -> None:
    of = guides()
    text = '{"name": "é😀\\n", "age": 41}'
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}})
    ids = prompt().text(text)
    drew = started("json_schema", schema, of=of)
    for count, token in enumerate(ids):
        replayed = started("json_schema", schema, of=of)
        replayed.replay(ids[:count])
        assert allowed(replayed) == allowed(drew) and replayed.may_end == drew.may_end
        drew.accept(token)
    assert drew.may_end
    with pytest.raises(ServerError) as caught:
        started("json_schema", schema, of=of).replay([*ids[:1], *prompt().text("7"), *ids])
    assert (caught.value.reason, caught.value.code, caught.value.facts["index"]) == ("NOT_RESUMABLE", "ABORTED", 1)


def test_answers_of_one_language_go_their_own_ways() -> None:
    of = guides()
    first, second = started("choice", "yes", "no", of=of), started("choice", "yes", "no", of=of)
    assert took(first, "yes") and first.ended
    assert took(second, "no") and second.ended
    assert not took(started("choice", "yes", "no", of=of), "ya")


def test_choices_are_taken_as_they_are_written() -> None:
    odd = ["a.b*", "[x]", "\\d", "é😀", "two\nlines", "/", '"', "a"]
    for string in odd:
        guide = started("choice", *odd)
        assert took(guide, string) and guide.may_end
    assert not took(started("choice", *odd), "axb")
    guide = started("choice", *odd)
    assert took(guide, "a") and not guide.ended, "a.b* begins with it"


JSON = r"""
root   ::= ws value ws  # anything
value  ::= object | array | string | number | "true" | "null"
object ::= "{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? ws "}"
array  ::= "[" ws (value (ws "," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? [0-9]+ ("." [0-9]{1,3})?
ws     ::= [ \n]*
"""

GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    (JSON, ['{"a": [1, 2.5, "x\\n é"], "b": null}', "[]", " [ 1,{} ] "], ["[1,]", "{", "1.2345"]),
    (r'root ::= "\u00e9" "😀" | "\U0001F600" | "\x41"', ["é😀", "😀", "A"], ["é", "B"]),
    ('root ::= [^\\]] [a-z/] ("x" | "y")+', ["aaxy", "[/x"], ["]ax", "aa"]),
    ("root ::= a-b\na-b ::= start\nstart ::= [-a] [a-] [a\\-c]", ["-a-", "a-c"], ["bac", "-ab"]),
    ('root ::= ("q"\n | # or\n "r"\n) "c"\n\n', ["qc", "rc"], ["q"]),
    ('root ::= "a"{2,3} "b"{2} "c"{1,} "d"?', ["aabbc", "aaabbcccd"], ["abbc", "aabc", "aabb"]),
    ('root ::= "a" | "" | \n"b"', ["a", "", "b"], ["c"]),
    ('root ::= "ab" "cd" | "abc" "e"', ["abcd", "abce"], ["abc"]),
    ('root ::= x "b"\nx ::= [a-z]+ .?', ["ab", "abb", "bb", "b\nb"], ["b", "a"]),
    ('root ::= "(" root ")" | [0-9]+ ("." [0-9]+)?', ["((12.5))", "7"], ["(1", ")"]),
    ('root ::= "a" [a-z]* "b" | "(" root ")"', ["ab", "(axyb)", "((abb))"], ["(ax)", "a(b)"]),
    ('root ::= term (("+" | "-") term)*\nterm ::= "x" | "(" root ")"', ["x", "x+x-(x+x)"], ["x+"]),
    ('root ::= "\\"\\\\[]{}()/|*+?.^$#" "\\t\\n\\r"', ['"\\[]{}()/|*+?.^$#\t\n\r'], [""]),
]


@pytest.mark.parametrize(("grammar", "inside", "outside"), GRAMMARS)
def test_a_grammar_allows_what_it_derives_and_nothing_else(grammar: str, inside: list[str], outside: list[str]) -> None:
    for text in inside:
        assert takes("grammar", grammar, text), text
    for text in outside:
        assert not takes("grammar", grammar, text), text


SCHEMAS: list[tuple[object, list[str], list[str]]] = [
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "3.5", '"3"']),
    ({"enum": ["é", 1, None]}, ['"é"', "1", "null"], ['"e"', "2"]),
    ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, ["[]", "[true,false]", "[ true ]"], ["[1]"]),
    ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"ab"', '""']),
    ({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}, ["[[],[[]]]"], ["[1]"]),
    (
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
        ['{"a":[{}]}'],
        ["{}"],
    ),
    (True, ["1", "[{}]", '"x"'], ["x"]),
]


@pytest.mark.parametrize(("schema", "inside", "outside"), SCHEMAS)
def test_a_schema_allows_what_is_valid_and_nothing_else(schema: object, inside: list[str], outside: list[str]) -> None:
    for text in inside:
        assert takes("json_schema", json.dumps(schema), text), text
    for text in outside:
        assert not takes("json_schema", json.dumps(schema), text), text


@pytest.mark.parametrize(("space", "taken"), [("", True), (" ", True), ("  ", False), ("\n" + " " * 32, True)])
def test_white_space_in_json_is_a_space_or_an_indented_line(space: str, taken: bool) -> None:
    assert takes("json_schema", "{}", f'{{{space}"a"{space}:{space}[{space}1{space}]}}') == taken
    assert not takes("json_schema", "{}", f'{{"a": 1}}{space}x')


def test_white_space_in_json_comes_to_an_end() -> None:
    for endless in (" ", "\n", "\n\t"):
        assert not takes("json_schema", "{}", f"[{endless * 40}]")
    assert takes("json_schema", "{}", json.dumps({"a": [1, {"b": [None]}]}, indent=4))


# -- what is refused ---------------------------------------------------------------------------------------------------

WRONG: list[tuple[Kind, str, str]] = [
    ("json_schema", "{", "is no JSON at line 1, column 2"),
    ("json_schema", "3", "is no object"),
    ("json_schema", '{"const": NaN}', "not valid"),
    ("json_schema", '{"type": "strng"}', "not valid"),
    ("json_schema", '{"type": "string", "pattern": "("}', "not valid"),
    ("json_schema", '{"not": {}}', "uses not"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "uses not"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uses uniqueItems"),
    ("json_schema", '{"oneOf": [{"type": "string"}, {"minLength": 2}]}', "uses oneOf"),
    ("json_schema", '{"$ref": "file:///etc/passwd"}', r"uses \$ref"),
    ("json_schema", "false", "allows no answer"),
    ("json_schema", '{"enum": []}', "allows no answer"),
    ("json_schema", '{"$ref": "#"}', "allows no answer"),
    ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "allows no answer"),
    ("regex", "a(", "no regular expression"),
    ("regex", "(?=a)b", "no regular expression"),
    ("regex", r"(a)\1", "no regular expression"),
    ("regex", "", "allows no answer"),
    ("regex", r"[^\s\S]", "allows no answer"),
    ("grammar", "", "has no rule root"),
    ("grammar", 'expr ::= "a"', "has no rule root"),
    ("grammar", "root ::= foo", "has no rule foo, which root names"),
    ("grammar", 'root ::= "a"\nb = "c"', "line 2, column 3: ::= is missing"),
    ("grammar", 'root ::= "a', "line 1, column 12"),
    ("grammar", "root ::= 'a'", "belongs to no rule"),
    ("grammar", 'root ::= ("a"', "a bracket is not closed"),
    ("grammar", r'root ::= "\q"', "an escape is not known"),
    ("grammar", r'root ::= "\uD800"', "an escape is no character"),
    ("grammar", 'root ::= "a"\nroot ::= "b"', "the rule root is there twice"),
    ("grammar", 'root ::= "a"{3,2}', "at most less often"),
    ("grammar", "root ::= []", "holds no character"),
    ("grammar", "root ::= root", "allows no answer"),
]


@pytest.mark.parametrize(("kind", "text", "what"), WRONG)
def test_b134_what_is_no_guide_is_refused_and_told_why(kind: Kind, text: str, what: str) -> None:
    assert re.search(what, refused(kind, text).message)


def _fitting(make: Callable[[int], str]) -> str:
    """The largest that a caller may send."""
    few, many = 1, GUIDE_BYTES
    while few < many:
        middle = (few + many + 1) // 2
        few, many = (middle, many) if len(make(middle)) <= GUIDE_BYTES else (few, middle - 1)
    return make(few)


def _references(form: str) -> Callable[[int], str]:
    """So many schemas, each of which leads to the next."""

    def make(count: int) -> str:
        leads = ",".join(f'"{i}":' + form.replace("@", f'{{"$ref":"#/$defs/{i + 1}"}}') for i in range(count))
        return f'{{"$defs":{{{leads},"{count}":{{}}}},"$ref":"#/$defs/0"}}'

    return make


def _rules(form: str) -> Callable[[int], str]:
    """So many rules, each of which names the next."""

    def make(count: int) -> str:
        lines = [f"a{i}::=" + form.replace("@", f"a{i + 1}") for i in range(count)]
        return "\n".join(["root::=a0", *lines, f'a{count}::="x"'])

    return make


HUGE: dict[str, tuple[Kind, str]] = {
    "brackets": ("json_schema", "[" * GUIDE_BYTES),
    "nested schemas": ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000),
    "a number of ten thousand digits": ("json_schema", f'{{"minimum": {"9" * 10_000}}}'),
    "references": ("json_schema", _fitting(_references("@"))),
    "nested references": ("json_schema", _fitting(_references('{"items":' * 90 + "@" + "}" * 90))),
    "references of objects": ("json_schema", _fitting(_references('{"properties":{"a":@},"required":["a"]}'))),
    "references in two ways": ("json_schema", _fitting(_references('{"anyOf":[@,@]}'))),
    "references to the start": ("json_schema", _fitting(_references('{"anyOf":[@,{"$ref":"#"}]}'))),
    "properties": ("json_schema", json.dumps({"properties": {f"k{i}": {} for i in range(4000)}})),
    "cases": ("json_schema", json.dumps({"anyOf": [{"properties": {f"k{i}": {"type": "null"}}} for i in range(1200)]})),
    "a pattern of patterns": ("json_schema", '{"type": "string", "pattern": "^(a{1000}){1000}$"}'),
    "a number of many remainders": ("json_schema", '{"type": "integer", "multipleOf": 1000000007}'),
    "repeated repetitions": ("regex", "(a{1000}){1000}"),
    "repeated repetitions after a word": ("regex", "so (a{1000}){1000}"),
    "nested groups": ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "stars": ("regex", "a" + "*" * 60_000),
    "one long word": ("regex", "a" * GUIDE_BYTES),
    "many words": ("regex", "|".join(f"x{i}.*y" for i in range(5000))),
    "nested groups of a grammar": ("grammar", "root ::= " + "(" * 60_000),
    "rules": ("grammar", _fitting(_rules("@"))),
    "rules that lead back": ("grammar", _fitting(_rules("@|root"))),
    "rules that double": ("grammar", _fitting(_rules("@ @"))),
    "rules of words": ("grammar", _fitting(_rules('"x"@'))),
    "many ways": ("grammar", "root ::= " + " | ".join(f'"w{i}" root' for i in range(3500)) + ' | "x"'),
    "repeated rules": ("grammar", 'root ::= a{1000}\na ::= b{1000}\nb ::= c{1000}\nc ::= "x" | root'),
    "ambiguous": ("grammar", 'root ::= root root | "a" | ""'),
}


@pytest.mark.parametrize("name", HUGE)
def test_b134_what_is_huge_is_compiled_or_refused_and_never_takes_the_process_with_it(name: str) -> None:
    kind, text = HUGE[name]
    assert len(text) <= GUIDE_BYTES
    try:
        guide = started(kind, text)
    except InvalidRequest as refusal:
        said = refusal.message
    else:
        assert allowed(guide)
        return
    assert "too large" in said or "nested more than 64 deep" in said


EXPLODING = ["a pattern of patterns", "repeated repetitions", "repeated repetitions after a word", "rules that double"]


@pytest.mark.parametrize("name", EXPLODING)
def test_b134_what_explodes_is_refused_before_it_is_followed(name: str) -> None:
    assert "too large" in refused(*HUGE[name]).message


def test_what_takes_longer_than_its_time_is_refused_and_tried_again_by_the_next() -> None:
    async def run() -> None:
        of = Guides(prompt(), VOCABULARY, seconds=0.0)
        language = Language("json_schema", ('{"enum": ' + json.dumps([f"v{i}" for i in range(5000)]) + "}",))
        with pytest.raises(InvalidRequest, match="takes more than 0 s"):
            await of.start(language, ())
        of._seconds = 60.0
        assert not (await of.start(language, ())).ended

    asyncio.run(run())


async def test_a_language_is_compiled_once_and_kept_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    of = guides()
    compiled: list[str] = []

    def counted(language: Language, *args: Any) -> object:
        compiled.append(language.text[0])
        return original(language, *args)

    import decoder_service.guide as module

    original = module._compiled
    monkeypatch.setattr(module, "_compiled", counted)
    first, *more = (Language("regex", (f"a{{{i}}}",)) for i in range(1, KEPT + 2))
    await asyncio.gather(*(of.start(first, ()) for _ in range(5)))
    leaver = asyncio.create_task(of.start(more[0], ()))
    await asyncio.sleep(0)
    leaver.cancel()
    await of.start(more[0], ())
    assert compiled == [first.text[0], more[0].text[0]]
    for language in more[1:]:
        await of.start(first, ())
        await of.start(language, ())
    await of.start(first, ())
    assert len(compiled) == KEPT + 1, "the first was used all the time, and each other once"
    await of.start(more[0], ())
    assert compiled[-1] == more[0].text[0], "it was the oldest"
    wrong = Language("regex", ("(",))
    errors = []
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            await of.start(wrong, ())
        errors.append(caught.value)
    assert compiled.count("(") == 1 and errors[0] is not errors[1]


def test_without_the_library_a_guide_is_refused_and_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unsupported) as caught:
        started("regex", "a")
    error: ChiasmError = caught.value
    assert error.reason == "FEATURE_DISABLED" and "chiasm[guided]" in str(error)
    assert error.facts == {"field": "guide", "extra": "guided"}
