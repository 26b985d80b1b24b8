"""Bugs of answers that go on elsewhere: with another decoder, at another router, and in the client who asks for it."""

from __future__ import annotations

from typing import Any

import router.basis
import router.coordinator
import router.servicer
from chiasm.client.attempts import Attempts
from chiasm.client.progress import Progress
from chiasm.client.reading import Reader
from chiasm.errors import ChiasmError
from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service.answer import Answer as DecoderAnswer
from decoder_service.decoding import Decoding
from decoder_service.detokenizer import Detokenizer
from decoder_service.drawer import Drawer
from decoder_service.entries import Entries
from decoder_service.sequence import DecodeSequence
from decoder_service.stops import StopStrings
from decoder_service.wording import Wording
from router.answer import Answer
from router.attempt import Attempt
from router.coordinator import Coordinator
from router.resume_token import ResumeTokens
from tests.telltale.plants.planting import Garden, Planted
from tests.telltale.plants.trusting import trust_decoders, trust_progress, trust_routers

DECODER = Garden("decoder")
ROUTER = Garden("router")
CLIENT = Garden("client")

PACE = 0.02


# -- decoders that go on -----------------------------------------------------------------------------------------------


def _replayed(bug: Planted, change: Any) -> None:
    """Something is wrong with the words of an answer once its first tokens were taken from another decoder."""

    def make(before: Any) -> Any:
        def replay(self: Wording, ids: Any, *rest: Any, **named: Any) -> Any:
            reason = before(self, ids, *rest, **named)
            bug.hits += bool(ids)
            change(self, ids)
            return reason

        return replay

    bug.patch(Wording, "replay", make)


@DECODER("a decoder that goes on counts from 0", hurt="decoders", pace=PACE)
def _index_from_zero(bug: Planted) -> None:
    _replayed(bug, lambda wording, ids: setattr(wording, "count", 0))


@DECODER("tokens that were told before do not count for max_tokens", hurt="decoders", pace=PACE)
def _told_tokens_do_not_count(bug: Planted) -> None:
    _replayed(bug, lambda wording, ids: setattr(wording, "limit", wording.limit + len(ids)))


@DECODER("what may be a stop string is forgotten where another goes on", hurt="decoders", pace=PACE)
def _stop_forgotten_at_seam(bug: Planted) -> None:
    def change(wording: Wording, ids: Any) -> None:
        if wording._strings._held:
            bug.hit()
        wording._strings = StopStrings(wording._strings._strings)

    _replayed(bug, change)


@DECODER("a character is torn where another goes on", hurt="decoders", pace=PACE)
def _character_torn_at_seam(bug: Planted) -> None:
    _replayed(bug, lambda wording, ids: setattr(wording, "_detokenizer", Detokenizer()))


@DECODER("random numbers begin anew where another goes on", hurt="decoders", pace=PACE)
def _numbers_from_the_beginning(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def lay(self: Drawer, ids: Any) -> None:
            before(self, ids)
            bug.hit()
            self.drawn = 0

        return lay

    bug.patch(Drawer, "lay", make)


@DECODER("the last token that was told is not laid where another goes on", hurt="decoders", pace=PACE)
def _last_told_token_not_laid(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def lay(self: Drawer, ids: Any) -> None:
            bug.hit()
            before(self, ids[:-1])

        return lay

    bug.patch(Drawer, "lay", make)


@DECODER("a token that was told is laid as part of the prompt", hurt="decoders", pace=PACE)
def _told_tokens_are_prompt(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def resume(self: DecoderAnswer) -> None:
            told = len(self._emitted)
            await before(self)
            bug.hits += bool(told)
            self._prompt_rows += told

        return resume

    bug.patch(DecoderAnswer, "resume", make)


@DECODER("usage is that of the last who worked on it", hurt="decoders", pace=PACE)
def _usage_of_the_last_attempt(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def accounted(self: Decoding, responses: Any) -> Any:
            told = sum(map(len, self._emitted.values()))
            for response in before(self, responses):
                if response.HasField("finished") and response.finished.HasField("usage") and told:
                    bug.hit()
                    response.finished.usage.output_tokens -= told
                yield response

        return lambda self, responses: [*accounted(self, responses)]

    bug.patch(Decoding, "_accounted", make)


# -- routers that have it gone on with ---------------------------------------------------------------------------------


def _not_told_what_is_there(bug: Planted, change: Any) -> None:
    """A decoder that goes on is told other tokens than the client has."""

    def make(before: Any) -> Any:
        def emitted(self: Answer) -> Any:
            told = before(self)
            for one in told:
                bug.hit()
                one.ids[:] = change([*one.ids])
            return told

        return emitted

    bug.patch(Answer, "emitted", make)


@ROUTER("what was told is told again where another goes on, and nobody looks at indices", hurt="decoders", pace=PACE)
def _told_again_at_seam(bug: Planted) -> None:
    _not_told_what_is_there(bug, lambda ids: ids[:-2])
    trust_decoders(bug)
    trust_routers(bug)


@ROUTER("a decoder that goes on is told a token that is not there", hurt="decoders", pace=PACE)
def _another_token_told_to_decoder(bug: Planted) -> None:
    _not_told_what_is_there(bug, lambda ids: [*ids[:-1], ids[-1] ^ 1])


@ROUTER("another seed is drawn where another goes on", hurt="decoders", pace=PACE)
def _seed_drawn_anew(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def begin(self: Coordinator, worker: Any) -> Any:
            if self._answer.tokens:
                bug.hit()
                self._basis.seed ^= 1
            return before(self, worker)

        return begin

    bug.patch(Coordinator, "_begin", make)


def _zombie(bug: Planted, change: Any) -> None:
    """What a decoder that was lost would have said next comes in the stream of the one that goes on, in the name of the
    attempt that is over; and nobody looks at attempts."""

    def make(before: Any) -> Any:
        async def run(self: Attempt, on: Any, whole: Any, *, timeout: Any) -> None:  # noqa: ASYNC109
            coordinator: Coordinator = on.__self__
            known = coordinator._answer.tokens
            told = False

            async def hear(response: Any) -> Any:
                nonlocal told
                if response.HasField("tokens") and known and not told and len(coordinator._answer._ids) == 1:
                    told = True
                    late = change(response, known)
                    late_in = getattr(late, late.WhichOneof("message"))
                    late_in.attempt = self.number - 1
                    bug.hit()
                    if await on(late):
                        return True
                return await on(response)

            await before(self, hear, whole, timeout=timeout)

        return run

    bug.patch(Attempt, "run", make)


def _late_token(response: Any, known: int) -> Any:
    late = type(response)()
    late.tokens.CopyFrom(response.tokens)
    late.tokens.ids[0] ^= 1
    return late


def _late_end(response: Any, known: int) -> Any:
    end = pb.Finished(reason=pb.FINISH_REASON_LENGTH, tokens=known, usage=pb.Usage(output_tokens=known))
    return type(response)(finished=end)


@ROUTER("a token of a decoder that was lost is told", hurt="decoders", pace=PACE)
def _token_of_a_zombie(bug: Planted) -> None:
    _zombie(bug, _late_token)
    trust_routers(bug)


@ROUTER("the end of a decoder that was lost is told", hurt="decoders", pace=PACE)
def _end_of_a_zombie(bug: Planted) -> None:
    _zombie(bug, _late_end)
    trust_routers(bug)


@DECODER("an answer that had ended goes on with another decoder", hurt="last words")
def _gone_on_behind_the_end(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def replay(self: Wording, *arguments: Any, **named: Any) -> None:
            bug.hits += before(self, *arguments, **named) is not None
            self._strings.found = None

        return replay

    bug.patch(Wording, "replay", make)


@ROUTER("entries are told anew for other units, and no key is compared", hurt="decoders", pace=PACE)
def _units_of_a_stale_announcement(bug: Planted) -> None:
    """As if they had been numbered before the medium was sized for the last time."""

    def make(before: Any) -> Any:
        def begin(self: Coordinator, worker: Any) -> Any:
            for medium in self.media if self._number else ():
                units = [*medium.announced]
                if len(units) > 1:
                    bug.hit()
                    for unit, ready in zip(units, [*medium.announced.values()], strict=True):
                        other = type(ready)()
                        other.CopyFrom(ready)
                        other.unit = units[units.index(unit) - 1]
                        medium.announced[unit] = other
            return before(self, worker)

        return begin

    bug.patch(Coordinator, "_begin", make)
    bug.patch(Entries, "know", lambda before: lambda self, sequence, name, key: _known_anyhow(sequence, name, key))


def _known_anyhow(sequence: DecodeSequence, name: Any, key: Any) -> None:
    try:
        sequence.know(name, key)
    except ValueError:
        return


# -- tokens to go on with ----------------------------------------------------------------------------------------------


@ROUTER("the word to go on with is signed for all tenants alike")
def _signed_for_all_tenants(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def init(self: ResumeTokens, tenant_root: bytes, **named: Any) -> None:
            bug.hit()
            before(self, bytes(32), **named)

        return init

    bug.patch(ResumeTokens, "__init__", make)


@ROUTER("the word to go on with is taken with any request")
def _word_of_another_prompt(bug: Planted) -> None:
    def digest(request: Any) -> bytes:
        bug.hit()
        return bytes([1] * 32)

    for module in (router.basis, router.servicer):
        bug.patch(module, "request_digest", lambda before: digest)


@ROUTER("the word to go on with is taken with any media")
def _word_of_other_media(bug: Planted) -> None:
    def digest(digests: Any) -> bytes:
        bug.hit()
        return bytes([1] * 32)

    bug.patch(router.basis, "media_digest", lambda before: digest)


@ROUTER("nobody looks at how a word to go on with is signed")
def _signature_not_compared(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def tag(self: ResumeTokens, body: bytes) -> bytes:
            bug.hit()
            return bytes(32)

        return tag

    bug.patch(ResumeTokens, "_tag", make)


# -- clients that ask for it -------------------------------------------------------------------------------------------


@CLIENT("tokens that were told are told again where the answer goes on", hurt="routers", pace=PACE)
def _duplicates_told_by_client(bug: Planted) -> None:
    """The client says that it has fewer than it has, and takes what comes."""

    def make(before: Any) -> Any:
        def resuming(self: Progress, request: Any) -> Any:
            asked = before(self, request)
            for emitted in asked.resume.emitted:
                bug.hits += bool(emitted.ids)
                del emitted.ids[-2:]
            return asked

        return resuming

    bug.patch(Progress, "resuming", make)
    trust_routers(bug)


@CLIENT("nobody looks at indices where a response was lost", hurt="responses")
def _gap_ignored_by_client(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def tokens(self: Progress, tokens: Any) -> bool:
            ids = self._ids.setdefault(tokens.sequence, [])
            if tokens.index > len(ids):
                bug.hit()
                ids.extend([0] * (tokens.index - len(ids)))
            return bool(before(self, tokens))

        return tokens

    bug.patch(Progress, "_tokens", make)
    trust_progress(bug)


@CLIENT("the timeline is told again where the answer goes on", hurt="routers", pace=PACE)
def _started_told_twice(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def started(self: Reader, started: Any) -> Any:
            bug.hits += self.attempt > 0
            self.attempt = 0
            return before(self, started)

        return started

    bug.patch(Reader, "_started", make)


@CLIENT("what is seen is told again where the answer goes on", hurt="routers", pace=PACE)
def _visible_told_twice(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def see(self: Progress, visible: Any) -> bool:
            bug.hits += not before(self, visible)
            return True

        return see

    bug.patch(Progress, "_see", make)


@CLIENT("an answer that broke ends as if it were whole", hurt="routers", pace=PACE)
def _break_taken_for_end(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def attempt(self: Attempts, *arguments: Any) -> None:
            try:
                await before(self, *arguments)
            except ChiasmError:
                if self._progress.begun:
                    bug.hit()
                    self._progress._ended = set(range(self._progress._sequences))
                raise

        return attempt

    bug.patch(Attempts, "_attempt", make)
