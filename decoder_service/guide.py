"""Answers that keep to a language: which tokens may come next.

A `Guide` follows one answer. `Guides` compiles languages for a model's vocabulary, each once, in threads, with limits
on all that it takes. The work is done by llguidance, an extra that need not be there. No batch and no sampling here.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from chiasm.errors import InvalidRequest, ServerError, Unsupported
from chiasm.models.family import Prompt
from decoder_service.language import Language, explained, to_grammar
from decoder_service.masks import Bits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

R = TypeVar("R")

SECONDS = 5.0
"""Of compiling one language. What is refused for its size is refused by the limits below, a good while before."""

KEPT = 32
"""Languages of a model that stay compiled, the ones last used. One that was refused is kept as refused."""

AT_ONCE = 2
"""Languages that are compiled at one time."""

_STACK = 256 << 20
"""Bytes. The library descends into schemas and grammars by recursion, and a stack that ends takes the process with it.
The deepest that GUIDE_BYTES can say (nested schemas that lead to each other) was seen to need more than 8 and less than
32 MiB. Only what is used of it is ever real."""

_LEXER_FUEL = 150_000
"""Of building a lexer: 0.1 s where an expression repeats what is repeated. The library's own bound lets a whole second
pass, and it may do so in one step, on the device's thread."""

_LEXER_STATES = 25_000
"""Of one answer, one to two kilobytes each."""

_WALKED = 6
"""Tokens that are tried of what was compiled: most that is too much to follow is so from the start."""

_FORCED = 64
"""Characters of a text that must come, that are tokenised to know the next token."""


class Guide:
    """The way of one answer through a compiled language.

    Args:
        matcher: is changed.
        ends: tokens without bytes that end the answer. They may come exactly where it may end.
    """

    def __init__(self, matcher: LLMatcher, language: Language, ends: Iterable[int]) -> None:
        self._matcher = matcher
        self._language = language
        self._ends = frozenset(ends)

    def fill(self, bits: Bits) -> None:
        """Sets the bits of the tokens that may come next. Those beyond the vocabulary mean nothing.

        Lets other threads run. Raises InvalidRequest SCHEMA_INVALID where that takes more than the limits let pass.
        """
        allowed = self._matcher.compute_bitmask()
        self._check()
        bits[:] = np.frombuffer(allowed, np.uint8)[: len(bits)]
        if self.may_end:
            for token in self._ends:
                bits[token // 8] |= 1 << token % 8

    def accept(self, token: int) -> None:
        """Goes on with a token that `fill` allowed. Raises as `fill` does."""
        if token not in self._ends:
            self._matcher.consume_token(token)
            self._check()

    @property
    def may_end(self) -> bool:
        """What was accepted is of the language as it is."""
        return self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """And nothing longer is."""
        return self._matcher.is_stopped()

    def replay(self, ids: Sequence[int]) -> None:
        """Goes on with tokens that were drawn elsewhere.

        Raises ServerError NOT_RESUMABLE, naming the first that may not come where it stands.
        """
        # An end has no text, and nothing comes behind it.
        text = ids[:-1] if ids and ids[-1] in self._ends else ids
        index = self._matcher.try_consume_tokens([*text])
        kept = index == len(text) and not self._matcher.is_error()
        if not kept or (len(text) < len(ids) and not self.may_end):
            raise ServerError(
                "NOT_RESUMABLE",
                f"token {index} of {len(ids)} that came does not keep to {self._language.kind}",
                code="ABORTED",
                facts={"index": index, "tokens": len(ids)},
            )

    def _check(self) -> None:
        if self._matcher.is_error():
            raise explained(self._language, self._matcher.get_error())


class Guides:
    """The languages of one model. Used from one event loop.

    Args:
        vocabulary: one past the largest id that can be drawn.
        seconds: of compiling one.
    """

    def __init__(self, prompt: Prompt, vocabulary: int, *, seconds: float = SECONDS) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        # At once: it takes a second for a large vocabulary, and no other thread runs meanwhile.
        self._tokenizer = _tokenizer(prompt, vocabulary)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._compiling: dict[Language, asyncio.Task[LLMatcher | InvalidRequest]] = {}
        self._kept: OrderedDict[Language, LLMatcher | InvalidRequest] = OrderedDict()

    async def start(self, language: Language, ends: Iterable[int]) -> Guide:
        """A guide at the beginning of an answer.

        Raises Unsupported FEATURE_DISABLED without the extra, InvalidRequest SCHEMA_INVALID for a language that is
        wrong, that allows no answer, or that takes too long or too much.
        """
        if self._tokenizer is None:
            raise Unsupported(
                "FEATURE_DISABLED",
                f"{language.kind} is not served here: its server has not installed chiasm[guided]",
                item=language.kind,
                facts={"field": "guide", "extra": "guided"},
            )
        compiled = self._kept.get(language)
        if compiled is None:
            task = self._compiling.get(language)
            if task is None:
                task = self._compiling[language] = asyncio.create_task(self._compile(language, self._tokenizer))
            compiled = await asyncio.shield(task)  # who leaves does not end it for the others
        if language in self._kept:
            self._kept.move_to_end(language)
        if isinstance(compiled, InvalidRequest):
            raise copy.copy(compiled)
        return Guide(compiled.deep_copy(), language, ends)

    async def _compile(self, language: Language, tokenizer: LLTokenizer) -> LLMatcher | InvalidRequest:
        try:
            await self._turns.acquire()
            compiling = _in_deep_thread(partial(_compiled, language, tokenizer, self._vocabulary))
            # A thread cannot be stopped: its turn is over when it has ended, however long anybody waits for it.
            compiling.add_done_callback(lambda _: self._turns.release())
            done, _ = await asyncio.wait([compiling], timeout=self._seconds)
            if not done:
                # Time is not its own fault alone, so the next who brings it tries again.
                return language.refused(f"takes more than {self._seconds:g} s", {"seconds": self._seconds})
            compiled = self._kept[language] = compiling.result()
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return compiled
        finally:
            del self._compiling[language]


def _compiled(language: Language, tokenizer: LLTokenizer, vocabulary: int) -> LLMatcher | InvalidRequest:
    """At the beginning of an answer, after a first look at what may come."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = to_grammar(language)
    except InvalidRequest as error:
        return error
    # Its other limits are good: 2,000 items in a row, some 15 ms of a step. Its errors would quote the guide.
    limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, max_lexer_states=_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    for walked in range(_WALKED):
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return explained(language, matcher.get_error())
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=vocabulary, bitorder="little")
        if not bits.any():
            if walked:
                break
            return language.refused("allows no answer")
        matcher.consume_token(int(bits.argmax()))
        if matcher.is_stopped() and not matcher.is_error():
            break
    matcher.reset()
    return matcher


def _tokenizer(prompt: Prompt, vocabulary: int) -> LLTokenizer | None:
    """None where the library is not installed."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        return None
    return LLTokenizer(TokenizerWrapper(_Vocabulary(prompt, vocabulary)), n_vocab=vocabulary + 1)


class _Vocabulary:
    """What the library asks of a tokenizer, by its names. Control tokens have no bytes here, and so never come. Its end
    of text is one past the last token, because which tokens end an answer is for each answer to say."""

    bos_token_id = None

    def __init__(self, prompt: Prompt, vocabulary: int) -> None:
        self._prompt = prompt
        self.eos_token_id = vocabulary
        self.tokens = [*map(prompt.token_bytes, range(vocabulary)), b"\xffend"]
        self.special_token_ids = [vocabulary]

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that must come, of which the library looks at the first: it could be 100 kB."""
        if not isinstance(text, str):
            raise TypeError("text is tokenised, bytes are not")
        return self._prompt.text(text[:_FORCED])


def _in_deep_thread(function: Callable[[], R]) -> asyncio.Future[R]:
    """Calls a function in a thread of its own that has room for a deep recursion, and ends with it."""
    with _sizing:
        before = threading.stack_size(_STACK)
        try:
            pool = ThreadPoolExecutor(1, thread_name_prefix="guide")
            called = asyncio.get_running_loop().run_in_executor(pool, function)
        finally:
            threading.stack_size(before)
    pool.shutdown(wait=False)
    return called


_sizing = threading.Lock()
"""The size of the stacks of threads to come is the process's."""
