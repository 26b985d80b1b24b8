"""Logits to tokens, for all rows of a batch at once.

Each row is drawn as it would be alone. The order is that of vLLM's sampler (the docstring of `vllm.v1.sample.Sampler`):
guides and bans, biases, penalties, temperature, min-p, top-k, top-p, and the draw. It knows no text, and no request
beyond what a `Draw` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.errors import ServerError
from decoder_service.masks import Bits, keep
from decoder_service.noise import Place, gumbel, gumbel_at
from decoder_service.penalties import NO_BIAS, NO_IDS, NO_PENALTIES, Bias, Ids, Penalties, Seen, ban, bias, penalise
from decoder_service.truncation import KEEP_ALL, Truncation, least

MOST_LOGPROBS = 20
"""Likeliest tokens that can be told at one place."""

_FEW = (256, 4096)
"""How many of the likeliest tokens of a row are looked at, before all are. Nearly always few are kept, and finding them
takes far less time than sorting a large vocabulary or making a random number for each of its tokens."""


@dataclass(frozen=True, eq=False, slots=True)
class Drawing:
    """How the tokens of a request are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the largest, the lowest id among equals.
        seed: 64 bits.
        logprobs: how many of the likeliest tokens are told with their log-probabilities, at most MOST_LOGPROBS; None
            tells none at all.
    """

    temperature: float = 0.0
    seed: int = 0
    truncation: Truncation = KEEP_ALL
    penalties: Penalties = NO_PENALTIES
    bias: Bias = NO_BIAS
    logprobs: int | None = None

    @property
    def plain(self) -> bool:
        """The largest logit is the token, and nobody asks more."""
        return not (self.temperature or self.penalised or len(self.bias.ids) or self.logprobs is not None)

    @property
    def penalised(self) -> bool:
        """What was seen before changes the logits."""
        return self.penalties != NO_PENALTIES


_NOTHING_SEEN = Seen()


@dataclass(frozen=True, eq=False, slots=True)
class Draw:
    """One token to be drawn.

    Attributes:
        index: in the output of its sequence.
        banned: ids that are not drawn here.
        seen: what was said before, for penalties.
        guide: fills in the bits of those that may be drawn here; without one, all may.
    """

    drawing: Drawing
    index: int
    sequence: int = 0
    banned: Ids = field(default_factory=lambda: NO_IDS)
    seen: Seen = _NOTHING_SEEN
    guide: Callable[[Bits], None] | None = None

    @property
    def place(self) -> Place:
        return Place(self.drawing.seed, self.sequence, self.index)


class Logprobs(NamedTuple):
    """Natural logarithms of the probabilities at one place: of the token drawn, and of the likeliest with their ids, in
    falling order. Those that cannot be drawn are left out."""

    drawn: float
    top: tuple[tuple[int, float], ...]


class Drawn(int):
    """The id of a token that was drawn. Those who only count tokens need not know that it may have `logprobs`, that it
    `ends` an answer behind which nothing may come, and the `row` and the `position` at which it was laid."""

    logprobs: Logprobs | None = None
    ends: bool = False
    row: int = 0
    position: int = 0


def draw(logits_v: Tensor, drawing: Drawing, *, index: int, banned: Iterable[int] = (), sequence: int = 0) -> Drawn:
    """The token of one row alone, (vocabulary,) logits. Raises what `draw_rows` returns for it."""
    one = Draw(drawing, index, sequence, np.array([*banned], dtype=np.int64))
    (drawn,) = draw_rows(logits_v.unsqueeze(0).clone(), [one])
    if isinstance(drawn, ServerError):
        raise drawn
    return drawn


def draw_rows(logits_rv: Tensor, draws: Sequence[Draw]) -> list[Drawn | ServerError]:
    """One token for each row.

    Returns for a row ServerError NONFINITE if a logit is NaN or infinite, or nothing is left to draw. Raises what a
    guide raises.

    Args:
        logits_rv: (rows, vocabulary) floats. They are changed.
    """
    # Before anything waits for the device: it computes the logits meanwhile.
    guided = _guided(draws, logits_rv.shape[1])
    finite = _finite(logits_rv)
    # Nothing that follows makes minus infinity more.
    keep(logits_rv, *guided)
    ban(logits_rv, [draw.banned for draw in draws])
    largest, ids = logits_rv.max(1)
    told: dict[int, Logprobs] = {}
    some = [row for row, draw in enumerate(draws) if not draw.drawing.plain]
    if some:
        ids[some], logprobs = _shaped(_rows(logits_rv, some), ids[some], [draws[row] for row in some])
        told = {some[row]: logprob for row, logprob in logprobs.items()}
    outcomes: list[Drawn | ServerError] = []
    columns = torch.stack([ids, finite, largest > -torch.inf], 1).tolist()
    for row, (token, sound, possible) in enumerate(columns):
        if not sound:
            outcomes.append(ServerError("NONFINITE", "the model produced a logit that is not finite"))
        elif not possible:
            outcomes.append(ServerError("NONFINITE", "every token is banned"))
        else:
            drawn = Drawn(token)
            drawn.logprobs = told.get(row)
            outcomes.append(drawn)
    return outcomes


def _guided(draws: Sequence[Draw], vocabulary: int) -> tuple[list[int], npt.NDArray[np.uint8]]:
    """The rows that have a guide, and for each of them the bits of the tokens that it allows."""
    guides = [(row, draw.guide) for row, draw in enumerate(draws) if draw.guide is not None]
    bits_gb = np.zeros((len(guides), -(-vocabulary // 8)), dtype=np.uint8)
    for (_, guide), bits in zip(guides, bits_gb, strict=True):
        guide(bits)
    return [row for row, _ in guides], bits_gb


def _finite(logits_rv: Tensor) -> Tensor:
    """(rows,) whether all logits of a row are finite. Those of the others become 0."""
    # A sum is many times faster than looking at each, and finite only if all are.
    finite = torch.isfinite(logits_rv.sum(1))
    if not bool(finite.all()):
        finite = torch.isfinite(logits_rv).all(1)
        logits_rv[~finite] = 0
    return finite


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows in order; no copy of all of them."""
    # Lists as an index are copied element by element, and take longer than most of what is done with the rows.
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, torch.tensor(rows, device=tensor.device))


def _shaped(logits_rv: Tensor, ids_r: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, dict[int, Logprobs]]:
    """(rows,) ids of rows that are more than a largest logit, whose ids came, and the log-probabilities of the rows
    that ask for them, by row."""
    drawings = [draw.drawing for draw in draws]
    changed = [row for row, drawing in enumerate(drawings) if drawing.penalised or len(drawing.bias.ids)]
    if changed:
        logits_rv = logits_rv.double()
        some = _rows(logits_rv, changed)
        bias(some, [drawings[row].bias for row in changed])
        penalise(some, [drawings[row].penalties for row in changed], [draws[row].seen for row in changed])
        if some is not logits_rv:
            logits_rv.index_copy_(0, torch.tensor(changed, device=logits_rv.device), some)
        ids_r[changed] = some.argmax(1)
    # Where nothing divides them, logits are told as they are.
    divisors = [drawing.temperature or 1.0 for drawing in drawings]
    temperatures_r1 = torch.tensor(divisors, dtype=torch.float64, device=logits_rv.device).unsqueeze(1)
    random = [row for row, drawing in enumerate(drawings) if drawing.temperature]
    if random:
        ids_r[random] = _random(_rows(logits_rv, random), temperatures_r1[random], [draws[row] for row in random])
    asking = [row for row, drawing in enumerate(drawings) if drawing.logprobs is not None]
    if not asking:
        return ids_r, {}
    counts = [drawings[row].logprobs or 0 for row in asking]
    scaled_rv = _rows(logits_rv, asking).double() / temperatures_r1[asking]
    return ids_r, dict(zip(asking, _logprobs(scaled_rv, ids_r[asking], counts), strict=True))


def _random(logits_rv: Tensor, temperatures_r1: Tensor, draws: Sequence[Draw]) -> Tensor:
    """(rows,) ids drawn from the softmax of what the truncation keeps. The Gumbel trick: argmax of logits + noise is
    such a draw, without normalising."""
    ids = torch.empty(len(draws), dtype=torch.long, device=logits_rv.device)
    vocabulary = logits_rv.shape[1]
    whole = [row for row, draw in enumerate(draws) if draw.drawing.truncation == KEEP_ALL]
    cut = [row for row, draw in enumerate(draws) if draw.drawing.truncation != KEEP_ALL]
    for few in _FEW:
        if not cut or few >= vocabulary:
            break
        some_rv = _rows(logits_rv, cut)
        likeliest, tokens = some_rv.topk(few)
        scaled_rk = likeliest.double().div_(temperatures_r1[cut])
        truncations = [draws[row].drawing.truncation for row in cut]
        least_r1, settled = least(scaled_rk, truncations, _totals(some_rv, temperatures_r1[cut], truncations))
        kept_rk = scaled_rk >= least_r1
        # They fall, so what is kept comes first.
        most = int(kept_rk.sum(1).max())
        noise = gumbel_at([draws[row].place for row in cut], tokens[:, :most])
        best = (scaled_rk.masked_fill_(~kept_rk, -torch.inf)[:, :most] + noise).argmax(1, keepdim=True)
        ids[cut] = tokens.gather(1, best).squeeze(1)
        cut = [row for row, done in zip(cut, settled.tolist(), strict=True) if not done]
    rows = [*whole, *cut]
    if rows:
        scaled_rv = torch.stack([logits_rv[row] for row in rows]).double().div_(temperatures_r1[rows])
        if cut:
            falling = scaled_rv[len(whole) :].sort(descending=True).values
            least_r1, _ = least(falling, [draws[row].drawing.truncation for row in cut])
            scaled_rv[len(whole) :].masked_fill_(scaled_rv[len(whole) :] < least_r1, -torch.inf)
        noise = gumbel([draws[row].place for row in rows], vocabulary, logits_rv.device)
        ids[rows] = noise.add_(scaled_rv).argmax(1)
    return ids


def _totals(logits_rv: Tensor, temperatures_r1: Tensor, truncations: Sequence[Truncation]) -> Tensor:
    """(rows, 1) logsumexp after temperature, of the rows that a top-p alone cuts; the others need none."""
    totals_r1 = torch.zeros_like(temperatures_r1)
    some = [row for row, cut in enumerate(truncations) if cut.top_p < 1 and not (cut.min_p or cut.top_k)]
    if some:
        scaled_rv = _rows(logits_rv, some).double() / temperatures_r1[some]
        totals_r1[some] = scaled_rv.logsumexp(1, keepdim=True)
    return totals_r1


def _logprobs(scaled_rv: Tensor, ids_r: Tensor, counts: Sequence[int]) -> list[Logprobs]:
    """What is told of each row, with so many of the likeliest."""
    logprobs_rv = scaled_rv.log_softmax(1)
    drawn = logprobs_rv.gather(1, ids_r.unsqueeze(1)).squeeze(1).tolist()
    # As many for every row, so that which of equals are the last does not depend on what the others ask.
    top, tokens = logprobs_rv.topk(min(MOST_LOGPROBS, logprobs_rv.shape[1]))
    # Of equals the lowest id comes first, as it does where the largest is drawn.
    tokens, order = tokens.sort(1)
    top, order = top.gather(1, order).sort(dim=1, descending=True, stable=True)
    told = zip(tokens.gather(1, order).tolist(), top.tolist(), strict=True)
    return [
        Logprobs(own, tuple(pair for pair in zip(*row, strict=True) if pair[1] > -np.inf)[:count])
        for own, row, count in zip(drawn, told, counts, strict=True)
    ]
