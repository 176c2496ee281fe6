"""Which ids were seen before, in 11 to 32 bytes an id."""

from __future__ import annotations

from array import array
from hashlib import blake2b

MAX_LOAD = 0.7  # of the table; linear probing slows down steeply above
FIRST_SLOTS = 1 << 12


class UniqueIds:
    """An open-addressing table of 64-bit digests: 0 marks an empty slot, a power of two of slots, linear probing.

    Two ids are taken for one only if their digests collide: a chance of 3 in a million among 10 million ids.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * FIRST_SLOTS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, text: str) -> bool:
        return _find(self._slots, _digest(text))[1]

    def add(self, text: str) -> bool:
        """Whether the id is new; it is remembered."""
        if not _insert(self._slots, _digest(text)):
            return False
        self._count += 1
        if self._count > MAX_LOAD * len(self._slots):
            self._grow()
        return True

    def _grow(self) -> None:
        larger = array("Q", bytes(16 * len(self._slots)))
        for digest in self._slots:
            if digest:
                _insert(larger, digest)
        self._slots = larger


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") or 1


def _find(slots: array[int], digest: int) -> tuple[int, bool]:
    """The slot of a digest, and whether the digest is in it."""
    mask = len(slots) - 1
    index = digest & mask
    while slots[index]:
        if slots[index] == digest:
            return index, True
        index = (index + 1) & mask
    return index, False


def _insert(slots: array[int], digest: int) -> bool:
    """Put the digest into its slot; False if it is there already."""
    index, there = _find(slots, digest)
    slots[index] = digest
    return not there
