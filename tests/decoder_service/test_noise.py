"""Random numbers of a place: numpy's own, whichever way and for whichever tokens they are made."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder_service.noise import Place, gumbel, gumbel_at, gumbel_made

WORD = st.integers(0, 2**64 - 1)
CPU = torch.device("cpu")


@given(st.lists(st.builds(Place, WORD, WORD, WORD), min_size=1, max_size=4), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_the_numbers_are_numpys_for_all_tokens_and_for_some(places: list[Place], vocabulary: int) -> None:
    expected = []
    for seed, sequence, before in places:
        counter = np.array([0, 0, before, 0], dtype=np.uint64)
        bits = np.random.Philox(key=np.array([seed, sequence], dtype=np.uint64), counter=counter)
        expected.append(np.random.Generator(bits).gumbel(size=vocabulary))
    made = gumbel(places, vocabulary, CPU)
    np.testing.assert_allclose(made.numpy(), np.stack(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gumbel_made(places, vocabulary, CPU), made, rtol=1e-14, atol=1e-14)
    chosen = torch.randint(vocabulary, (len(places), 7), generator=torch.Generator().manual_seed(vocabulary))
    torch.testing.assert_close(gumbel_at(places, chosen), made.gather(1, chosen), rtol=1e-14, atol=1e-14)
