"""What makes single tokens more or less likely than the model does: bans, biases, and what was said before.

All of it changes logits in place, for all rows of a batch at once. It knows no temperature and draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids: TypeAlias = npt.NDArray[np.int64]

NO_IDS: Ids = np.empty(0, dtype=np.int64)


class Bias(NamedTuple):
    """What is added to the logits of single tokens: ids, each once, and as many numbers."""

    ids: Ids
    values: npt.NDArray[np.float64]


NO_BIAS = Bias(NO_IDS, np.empty(0))


class Seen:
    """The tokens of one timeline: each once, with the times that it is in the output."""

    def __init__(self) -> None:
        self._at: dict[int, int] = {}
        self._ids = self._counts = NO_IDS

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._at)]

    @property
    def counts(self) -> Ids:
        """How often each of `ids` is in the output; 0 for one that is in the prompt alone."""
        return self._counts[: len(self._at)]

    def read(self, ids: Iterable[int]) -> None:
        """Notes tokens of the prompt."""
        for token in ids:
            self._place(token)

    def add(self, token: int) -> None:
        """Notes a token of the output."""
        # The place comes first: noting it may move the counts.
        at = self._place(token)
        self._counts[at] += 1

    def _place(self, token: int) -> int:
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            more = np.zeros(max(at, 64), dtype=np.int64)
            self._ids = np.concatenate([self._ids, more])
            self._counts = np.concatenate([self._counts, more])
        self._ids[at] = token
        return at


class Penalties(NamedTuple):
    """Of one row. The defaults change nothing.

    Attributes:
        repetition: divides positive and multiplies negative logits of every token seen, in prompt or output.
            (Keskar et al., "CTRL", 2019; negative logits as Hugging Face's `RepetitionPenaltyLogitsProcessor` has it)
        frequency: is subtracted for each time a token is in the output.
        presence: is subtracted once from a token that is in the output. (Both as OpenAI's API defines them.)
    """

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


NO_PENALTIES = Penalties()


def ban(logits_rv: Tensor, banned: Sequence[Ids]) -> None:
    """Sets the logits of each row's banned tokens to minus infinity."""
    logits_rv[_places(banned, logits_rv.device)] = -torch.inf


def bias(logits_rv: Tensor, biases: Sequence[Bias]) -> None:
    """Adds each row's biases to its (rows, vocabulary) logits."""
    values = torch.from_numpy(np.concatenate([one.values for one in biases]))
    logits_rv[_places([one.ids for one in biases], logits_rv.device)] += values.to(logits_rv)


def penalise(logits_rv: Tensor, penalties: Sequence[Penalties], seen: Sequence[Seen]) -> None:
    """Applies each row's penalties to its (rows, vocabulary) logits: repetition, then frequency, then presence, as
    vLLM's sampler has them."""
    places = _places([one.ids for one in seen], logits_rv.device)
    counts = torch.from_numpy(np.concatenate([one.counts for one in seen])).to(logits_rv)
    repetition, frequency, presence = torch.tensor(penalties, dtype=logits_rv.dtype, device=logits_rv.device)[
        places[0]
    ].unbind(1)
    logits = logits_rv[places]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits_rv[places] = logits - frequency * counts - presence * (counts > 0)


def _places(ids: Sequence[Ids], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and id of each of the rows' ids, as an index of (rows, vocabulary) logits."""
    rows = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    return torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(ids)).to(device)
