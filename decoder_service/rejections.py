"""Entries that were not believed: counted by reason, logged, and told louder when one key is rejected again and again.

A rejected entry is forgotten and encoded afresh, so an accident is over after one line of the log. One that comes back
wrong is none: memory that breaks, a program that writes where it must not, somebody who writes entries without the
secret. A key is not shut out for that: nothing wrong is ever used, and a request that meets it twice ends by itself.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import fields
from typing import Final

from chiasm.cache.entry import Contract
from chiasm.cache.sealed import EntryKey

OFTEN: Final = 3
"""Rejections of one key that are no accident any more."""

REASONS: Final = ("header", "size", "tag", *(field.name for field in fields(Contract)))
"""What `chiasm.cache.entry.open_entry` may answer."""

_log = logging.getLogger(__name__)


class Rejections:
    """What one decoder rejected.

    Args:
        most: keys remembered; the one that was rejected longest ago is forgotten first.

    Attributes:
        counts: by reason, all of them from the start.
        absent: entries that were announced and not there.
    """

    def __init__(self, *, most: int = 4096) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.absent = 0
        self._most = most
        self._times: OrderedDict[EntryKey, int] = OrderedDict()

    def note(self, key: EntryKey, reason: str) -> None:
        """An entry was rejected."""
        self.counts[reason] += 1
        times = self._times.pop(key, 0) + 1
        self._times[key] = times
        if len(self._times) > self._most:
            self._times.popitem(last=False)
        extra = {"entry": key.hex()[:16], "reason": reason, "times": times}
        if times < OFTEN:
            _log.warning("an entry is wrong and is encoded again", extra=extra)
        else:
            _log.error("an entry is wrong again and again: memory, or somebody who writes to it", extra=extra)
