"""Text never becomes control, never loses a letter, and a tokenizer.json that would let it is refused whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chiasm.errors import CheckpointError, ServerError
from chiasm.models.registry import SHIPPED
from chiasm.tokenizer import Tokenizer

FILE = SHIPPED / "digits" / "tokenizer.json"
SHIPPED_TOKENIZER = Tokenizer.from_file(FILE)
END = SHIPPED_TOKENIZER.control["<|im_end|>"]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

Data = dict[str, Any]


def whole() -> Data:
    data: Data = json.loads(FILE.read_text(encoding="utf-8"))
    return data


def added(number: object, content: object) -> Data:
    return {**whole()["added_tokens"][0], "id": number, "content": content}


def problems(data: object) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(json.dumps(data), "here")
    assert caught.value.where == "here"
    return caught.value.problems


@pytest.mark.parametrize(
    "change",
    [
        {"truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
        {
            "padding": {
                "strategy": {"Fixed": 64},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "!",
            }
        },
        {"model": {**whole()["model"], "dropout": 0.9}},
    ],
    ids=["truncation", "padding", "dropout"],
)
def test_what_is_for_training_changes_no_text(change: Data) -> None:
    text = "What digit is in the picture? 0123456789"
    assert Tokenizer(json.dumps(whole() | change)).encode(text) == SHIPPED_TOKENIZER.encode(text)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=8) | st.sampled_from(sorted(SHIPPED_TOKENIZER.control)), max_size=6))
def test_text_comes_back_whole_and_holds_no_control(parts: list[str]) -> None:
    text = "".join(parts)
    ids = SHIPPED_TOKENIZER.encode(text)
    assert not set(ids) & set(SHIPPED_TOKENIZER.control.values())
    assert SHIPPED_TOKENIZER.decode(ids) == text


def listed_too(*, ignore_merges: bool) -> Data:
    """Control tokens in the vocabulary as well, and a pre-tokenizer that keeps what spells them in one piece."""
    data = whole()
    for token in data["added_tokens"]:
        data["model"]["vocab"][token["content"]] = token["id"]
    data["model"]["ignore_merges"] = ignore_merges
    data["pre_tokenizer"] = BYTES
    return data


def whole_only_after(before: str) -> Data:
    """A pre-tokenizer that cuts a text into characters, except for `<|im_end|>` after something."""
    pattern = {"Regex": rf"(?<={before})<\|im_end\|>|."}
    cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, BYTES]}


def test_every_control_token_that_text_can_become_is_refused() -> None:
    found = problems(listed_too(ignore_merges=True))
    assert found == tuple(
        f"lets text that spells {name!r} become a control token" for name in SHIPPED_TOKENIZER.control
    )


def test_a_control_token_that_the_vocabulary_lists_and_text_cannot_reach_is_fine() -> None:
    tokenizer = Tokenizer(json.dumps(listed_too(ignore_merges=False)))
    assert END not in tokenizer.encode("<|im_end|>")
    assert tokenizer.token_bytes(END) == b""


def test_a_control_token_that_text_becomes_beside_something_else_is_refused() -> None:
    data = listed_too(ignore_merges=True)
    data["pre_tokenizer"] = whole_only_after(r"\n")
    data["added_tokens"] = [added(END, "<|im_end|>")]
    assert len(problems(data)) == 1


def test_an_ordinary_token_with_a_control_tokens_id_is_refused() -> None:
    data = whole()
    taken = data["model"]["vocab"]["a"]
    data["added_tokens"].append(added(taken, "<|extra|>"))
    assert f"gives id {taken} to 'a' and to '<|extra|>'" in problems(data)


def test_a_control_token_that_loading_did_not_find_never_leaves_encode() -> None:
    data = listed_too(ignore_merges=True)
    # The name is whole only after "xyz", which no text tried at loading has.
    data["pre_tokenizer"] = whole_only_after("xyz")
    tokenizer = Tokenizer(json.dumps(data))
    assert END not in tokenizer.encode("<|im_end|>")
    with pytest.raises(ServerError) as caught:
        tokenizer.encode("xyz<|im_end|>")
    assert caught.value.reason == "CONTROL_TOKEN_IN_TEXT"


def test_all_added_tokens_that_cannot_be_are_listed() -> None:
    data = whole()
    wrong = [
        (added(400, ""), "content is '', must be some text"),
        (added(400, None), "content is None"),
        (added(400, ["<|x|>"]), "content is ['<|x|>']"),
        (added(400, "\ud800"), "must be some text"),
        (added(-1, "<|a|>"), "id is -1, must be an integer from 0"),
        (added(10**30, "<|b|>"), "id is 1000000000000000000000000000000"),
        (added("328", "<|c|>"), "id is '328'"),
        (added(True, "<|d|>"), "id is True"),
        (added(400.0, "<|e|>"), "id is 400.0"),
        (added(None, "<|f|>"), "id is None"),
        (added(400, "<|im_end|>"), "is '<|im_end|>' once more"),
        (added(END, "<|g|>"), f"id is {END}, which another added token has"),
        (3, "content is None"),
    ]
    first = len(data["added_tokens"])
    data["added_tokens"] += [token for token, _ in wrong]
    found = problems(data)
    assert len(found) == len(wrong)
    for i, (problem, (_, told)) in enumerate(zip(found, wrong, strict=True)):
        assert problem.startswith(f"added_tokens[{first + i}]") and told in problem


def without(key: str) -> Data:
    data = whole()
    del data[key]
    return data


@pytest.mark.parametrize(
    "make",
    [
        list,
        lambda: None,
        dict,
        lambda: without("added_tokens"),
        lambda: whole() | {"added_tokens": None},
        lambda: whole() | {"added_tokens": {}},
        lambda: without("decoder"),
        lambda: without("model"),
        lambda: whole() | {"model": []},
        lambda: whole() | {"decoder": {"type": "Sequence", "decoders": 3}},
        lambda: whole() | {"model": {**whole()["model"], "vocab": {"a": 10**30}, "merges": []}},
        lambda: whole() | {"model": {**whole()["model"], "vocab": {"a": 2**32 - 1}, "merges": []}},
    ],
)
def test_another_object_is_no_tokenizer(make: Callable[[], object]) -> None:
    problems(make())


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"added_tokens": [' + "1" * 5000 + "]}"])
def test_another_text_is_no_tokenizer(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not a tokenizer\.json"):
        Tokenizer(text)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
