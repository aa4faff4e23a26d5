"""The two capability tables: what a kernel may read from and write to.

A kernel only ever holds a handle, ``generation << 32 | index``. Closing an entry clears its
handle and the next use of the index has another generation, so that an old handle is refused and
never misread.

Ownership of an entry's words: the host writes them all while the entry is closed, and opens it
by storing HANDLE with release. From then on HANDLE stays the host's; the words marked "poller"
are the poller's alone. To close, the host clears HANDLE, raises REVISION, waits until the poller
echoes it (so that no admission still holds the old handle), and then until IN_FLIGHT is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuq.compiling import inlined
from gpuq.layout import HANDLE_INDEX_BITS, HANDLE_INDEX_MASK, LINE_WORDS, MAX_GENERATION
from gpuq.ordering import as_signed, load_acquire, store_release

# Words of a source entry.
HANDLE = 0  # host; 0 while closed
IN_FLIGHT = 1  # poller; requests admitted and not completed
DIRECT_DESCRIPTOR = 2  # -1 where the file system refuses O_DIRECT
BUFFERED_DESCRIPTOR = 3
ALIGNMENT = 4  # of offset and length of a direct read, in bytes
LIMIT_START = 5  # first byte that may be asked for
LIMIT_END = 6  # one past the last
IS_DIRECT = 7  # poller; whether reads go through DIRECT_DESCRIPTOR now
MUST_BE_DIRECT = 8  # 1: never fall back to buffered reads
FALLBACK_ERRNO = 9  # poller; why IS_DIRECT was cleared while serving
IS_PROVEN = 10  # poller; a direct read of this file has succeeded
ONLY_STAGED = 11  # 1: direct reads go to staging only, see `direct_file.pins_memory`
SOURCE_WORDS = 2 * LINE_WORDS

# Words of a destination entry; HANDLE and IN_FLIGHT as above.
ADDRESS = 2
NBYTES = 3
KIND = 4  # HOST_MEMORY or DEVICE_MEMORY, see `gpuq.host.copier`
DESTINATION_WORDS = LINE_WORDS

MAX_OFFSET = 1 << 62
"""Largest file offset that is accepted, so that rounding up to an alignment cannot overflow."""

assert ONLY_STAGED < SOURCE_WORDS
assert KIND < DESTINATION_WORDS


@inlined
def lookup(table: Any, entry_words: Any, entries: Any, handle: Any) -> Any:
    """Return the first word of the open entry with this handle, or -1."""
    index = handle & HANDLE_INDEX_MASK
    if handle <= 0 or index >= entries:
        return -1
    base = index * entry_words
    # Pairs with the host's release when it opened the entry: its other words are visible.
    if as_signed(load_acquire(table, base + HANDLE)) != handle:
        return -1
    return base


@inlined
def add_in_flight(table: Any, base: Any, change: Any) -> None:
    """Count a request in (+1) or out (-1); the poller is the only writer."""
    # Pairs with the host's acquire in `in_flight`: what the request did is over.
    store_release(table, base + IN_FLIGHT, table[base + IN_FLIGHT] + change)


class CapabilityTable:
    """Host side of one table: gives out indices and generations.

    Parameters
    ----------
    entries : int
        How many may be open at once.
    entry_words : int
        Words of an entry.
    what : str
        "source" or "destination", for messages.
    """

    def __init__(self, entries: int, entry_words: int, what: str) -> None:
        self.words = np.zeros(entries * entry_words, dtype=np.int64)
        self.entries = entries
        self.entry_words = entry_words
        self.what = what
        self._generations = [1] * entries
        self._free = list(range(entries - 1, -1, -1))

    def reserve(self) -> int:
        """Take a closed entry and return its index; -1 where none is left."""
        return self._free.pop() if self._free else -1

    def publish(self, index: int, words: dict[int, int]) -> int:
        """Fill a reserved entry with ``{position: value}``, open it, and return its handle."""
        base = index * self.entry_words
        # HANDLE is 0 already, and the poller may load it at any time.
        self.words[base + HANDLE + 1 : base + self.entry_words] = 0
        for position, value in words.items():
            self.words[base + position] = value
        handle = self._generations[index] << HANDLE_INDEX_BITS | index
        store_release(self.words, base + HANDLE, handle)
        return handle

    def retract(self, *handles: int) -> None:
        """Refuse new requests for these handles from now on."""
        for handle in handles:
            store_release(self.words, self._base(handle) + HANDLE, 0)

    def in_flight(self, *handles: int) -> int:
        """Return how many admitted requests still use the entries."""
        bases = map(self._base, handles)
        return sum(int(load_acquire(self.words, base + IN_FLIGHT)) for base in bases)

    def word(self, handle: int, position: int) -> int:
        """Return one word of an entry."""
        return int(load_acquire(self.words, self._base(handle) + position))

    def recycle(self, *handles: int) -> None:
        """Give the indices of retracted, idle entries back, with the next generation."""
        for handle in handles:
            index = handle & HANDLE_INDEX_MASK
            if self._generations[index] < MAX_GENERATION:
                self._generations[index] += 1
                self._free.append(index)

    def _base(self, handle: int) -> int:
        return (handle & HANDLE_INDEX_MASK) * self.entry_words
