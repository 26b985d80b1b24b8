"""What a page of text depends on, as a chain of digests: two timelines whose pages have equal digests have equal keys
and values there, up to the order of floating-point sums.

Digest number n covers rows 0 to (n + 1) * page_size: ids, positions, which units each row sees, their entries and
their places. It is rooted in tenant and model, so that no tenant finds what another has asked.
"""

from __future__ import annotations

from collections.abc import Mapping

import blake3
import numpy as np

from chiasm.cache.framing import framed
from chiasm.cache.sealed import EntryKey
from chiasm.timeline import Timeline, UnitName


def domain_of(root: bytes, identity: bytes, fingerprint: str) -> bytes:
    """Within which prefixes and units are shared: 32 bytes, of a tenant's root (`chiasm.cache.tenant`), the identity
    of its entries and the fingerprint of the checkpoint."""
    derived = blake3.blake3(root, derive_key_context="chiasm 2026 prefixes that a tenant shares")
    return derived.update(framed([identity, fingerprint.encode()])).digest()


def prompt_digest(timeline: Timeline, rows: int) -> bytes:
    """Of the token ids of the first rows, placeholders included: BLAKE3 of four bytes each, the lowest first."""
    return blake3.blake3(np.array(timeline.ids(0, rows), dtype="<u4").tobytes()).digest()


class Chain:
    """The digests of one timeline's pages, as far as they are known.

    Args:
        domain: `domain_of`; None for a timeline that shares nothing.
    """

    def __init__(self, domain: bytes | None, page_size: int) -> None:
        self.domain = domain
        self.page_size = page_size
        self._digests: list[bytes] = []

    def digest(self, page: int, timeline: Timeline, keys: Mapping[UnitName, EntryKey]) -> bytes | None:
        """Of page number `page`; None while its rows are not all laid, or the entry of a unit in them is unknown.

        Args:
            keys: of the timeline's units, as far as they are known.
        """
        if self.domain is None:
            return None
        while len(self._digests) <= page:
            link = self._link(len(self._digests), timeline, keys)
            if link is None:
                return None
            self._digests.append(link)
        return self._digests[page]

    def truncate(self, rows: int) -> None:
        """Forgets the pages in which a row from `rows` on lies."""
        del self._digests[rows // self.page_size :]

    def _link(self, page: int, timeline: Timeline, keys: Mapping[UnitName, EntryKey]) -> bytes | None:
        start, stop = page * self.page_size, (page + 1) * self.page_size
        if stop > len(timeline):
            return None
        assert self.domain is not None
        digest = blake3.blake3(self._digests[-1] if page else self.domain)
        digest.update(timeline.row_bytes(start, stop))
        # A unit counts from its first placeholder on: a family may lay its features over them. Every part has one
        # length, and the units are the last of them, so nothing needs a frame.
        for unit in timeline.units_begun(start, stop):
            key = keys.get(unit.name)
            if key is None:
                return None
            digest.update(key)
            digest.update(unit.start.to_bytes(8, "little") + unit.layout.vision_tokens.to_bytes(8, "little"))
        return digest.digest()
