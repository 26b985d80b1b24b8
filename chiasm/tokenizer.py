"""Text to token ids and back to bytes, with control tokens kept out of the text's reach.

User text is encoded by a tokenizer that knows no added tokens, so `<|im_end|>` typed by a user is nine or so ordinary
tokens and never the end of a turn. Control tokens are looked up by name, by those who write templates. A tokenizer.json
with which text could become control is refused, and what it says about cutting, padding and random merges is for
training: here all of a text is encoded, the same way every time.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import tokenizers

from chiasm.errors import CheckpointError, ServerError

_MAX_ID = 2**31 - 1
_AROUND = ("{}", " {}", "{} ", "\n{}\n", "a{}a", "{0}{0}")
"""Texts in which a control token's name is tried, because pre-tokenizers cut a text by what stands beside it."""


class Tokenizer:
    """A byte-level `tokenizer.json`.

    Attributes:
        control: ids of the added tokens by name; text can never become one of them.
        vocab_size: one past the largest id.
    """

    def __init__(self, data: str, where: str = "tokenizer.json") -> None:
        """`data` is the text of a tokenizer.json.

        Raises CheckpointError if it is none or not byte-level; and listing every added token that has no name or no
        id of its own, and every one that text could become.
        """
        try:
            whole = json.loads(data)
            if not isinstance(whole, dict) or not isinstance(whole.get("added_tokens"), list):
                raise CheckpointError(where, ["holds no list of added_tokens"])
            if not _is_byte_level(whole.get("decoder")):
                raise CheckpointError(where, ["only byte-level tokenizers are supported"])
            self.control = _control_tokens(whole["added_tokens"], where)
            whole |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            whole["model"].pop("dropout", None)
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(whole))
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception for anything it cannot read
            raise CheckpointError(where, [f"is not a tokenizer.json ({type(error).__name__})"]) from None
        self._names = {token: name for name, token in self.control.items()}
        vocabulary = self._plain.get_vocab(with_added_tokens=False)
        try:
            problems = [*self._shared(vocabulary), *self._reached()]
        except Exception as error:  # as above
            raise CheckpointError(where, [f"cannot encode text ({type(error).__name__})"]) from None
        if problems:
            raise CheckpointError(where, problems)
        self.vocab_size = 1 + max((*vocabulary.values(), *self._names), default=-1)
        self._bytes = {i: _to_bytes(text) for text, i in vocabulary.items() if i not in self._names}
        ordered = sorted(self.control, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def _shared(self, vocabulary: Mapping[str, int]) -> Iterator[str]:
        """Ids of ordinary tokens that are control tokens as well, under another name, or beyond any vocabulary."""
        for text, token in vocabulary.items():
            if self._names.get(token, text) != text:
                yield f"gives id {token} to {text!r} and to {self._names[token]!r}"
            if token > _MAX_ID:
                yield f"gives id {token} to {text!r}, at most {_MAX_ID} is possible"

    def _reached(self) -> Iterator[str]:
        """Control tokens that text becomes when it spells them, as it can where the vocabulary lists them too."""
        for name in self.control:
            tried = (self._plain.encode(text.format(name), add_special_tokens=False) for text in _AROUND)
            if any(not self._names.keys().isdisjoint(encoded.ids) for encoded in tried):
                yield f"lets text that spells {name!r} become a control token"

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Raises CheckpointError for a file that is missing, cannot be read, or is no such tokenizer."""
        try:
            data = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(path.parent.name, [f"{path.name} is missing"]) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(path.parent.name, [f"{path.name} cannot be read ({type(error).__name__})"]) from None
        return cls(data, f"{path.parent.name}/{path.name}")

    def encode(self, text: str) -> list[int]:
        """Ordinary tokens of `text`, whatever it spells. Other threads run meanwhile: megabytes take seconds.

        Raises ServerError CONTROL_TOKEN_IN_TEXT rather than return a control token: a tokenizer whose control tokens
        can be reached in a way that loading did not find.
        """
        # Of the library's ways to encode only those for batches let go of the interpreter's lock.
        (encoded,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        if not self._names.keys().isdisjoint(ids):
            raise ServerError("CONTROL_TOKEN_IN_TEXT", "the model's tokenizer turns this text into a control token")
        return ids

    def split(self, template_text: str) -> list[str | int]:
        """Text written by a template, cut at its control tokens: strings and control ids, in order."""
        pieces: list[str | int] = []
        at = 0
        for match in self._controls.finditer(template_text) if self._controls else ():
            if match.start() > at:
                pieces.append(template_text[at : match.start()])
            pieces.append(self.control[match.group()])
            at = match.end()
        if at < len(template_text):
            pieces.append(template_text[at:])
        return pieces

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for. Control tokens, and ids that the vocabulary does not have, stand for none."""
        return self._bytes.get(token, b"")

    def name(self, token: int) -> str | None:
        """The name of a control token, None for an ordinary one."""
        return self._names.get(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of complete ids; a broken character at either end becomes U+FFFD. Control tokens are left out."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


def _control_tokens(added: Sequence[object], where: str) -> dict[str, int]:
    """Ids by name. Raises CheckpointError listing every token without a name or an id, or with another's."""
    problems = []
    control: dict[str, int] = {}
    for i, entry in enumerate(added):
        token = entry if isinstance(entry, dict) else {}
        name, number = token.get("content"), token.get("id")
        if not isinstance(name, str) or not name or any("\ud800" <= character <= "\udfff" for character in name):
            problems.append(f"added_tokens[{i}].content is {reprlib.repr(name)}, must be some text")
        elif type(number) is not int or not 0 <= number <= _MAX_ID:
            problems.append(f"added_tokens[{i}].id is {reprlib.repr(number)}, must be an integer from 0 to {_MAX_ID}")
        elif name in control:
            problems.append(f"added_tokens[{i}] is {name!r} once more")
        elif number in control.values():
            problems.append(f"added_tokens[{i}].id is {number}, which another added token has")
        else:
            control[name] = number
    if problems:
        raise CheckpointError(where, problems)
    return control


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    parts = decoder.get("decoders", [])
    return decoder.get("type") == "ByteLevel" or any(_is_byte_level(part) for part in parts)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies: printable Latin-1 characters stand
    for themselves, the others for 256, 257, ... in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet.values()]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _to_bytes(text: str) -> bytes:
    if all(character in _ALPHABET for character in text):
        return bytes(_ALPHABET[character] for character in text)
    return text.encode()
