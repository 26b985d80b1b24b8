"""Text to token ids and back to bytes, with control tokens kept out of the text's reach.

User text is encoded by a tokenizer that knows no added tokens, so `<|im_end|>` typed by a user is nine or so ordinary
tokens and never the end of a turn. Control tokens are looked up by name, by those who write templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from chiasm.errors import CheckpointError


class Tokenizer:
    """A byte-level `tokenizer.json`.

    Attributes:
        control: ids of the added tokens by name; text can never become one of them.
        vocab_size: one past the largest id.
    """

    def __init__(self, data: str, where: str = "tokenizer.json") -> None:
        """`data` is the text of a tokenizer.json. Raises CheckpointError if it is none, or not byte-level."""
        try:
            whole = json.loads(data)
            added = whole["added_tokens"]
            if not _is_byte_level(whole.get("decoder")):
                raise CheckpointError(where, ["only byte-level tokenizers are supported"])
            self.control: dict[str, int] = {token["content"]: token["id"] for token in added}
            whole["added_tokens"] = []
            whole["post_processor"] = None
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(whole))
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exception for anything it cannot read
            raise CheckpointError(where, [f"is not a tokenizer.json ({type(error).__name__})"]) from None
        self._names = {token: name for name, token in self.control.items()}
        vocabulary = self._plain.get_vocab(with_added_tokens=False)
        self.vocab_size = 1 + max((*vocabulary.values(), *self._names), default=-1)
        self._bytes = {i: _to_bytes(text) for text, i in vocabulary.items() if i not in self._names}
        ordered = sorted(self.control, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        try:
            return cls(path.read_text(encoding="utf-8"), f"{path.parent.name}/{path.name}")
        except FileNotFoundError:
            raise CheckpointError(path.parent.name, [f"{path.name} is missing"]) from None

    def encode(self, text: str) -> list[int]:
        """Ordinary tokens of `text`, whatever it spells."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
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
