"""What the soak's files hold, so that every byte that arrives can be checked by itself.

The byte at an offset follows from the file's number and that offset alone. A byte of another
file, or of another place in the right one, is seen with probability 255/256, and no request is of
one byte for long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

GUARD = 0xEE
"""What destinations hold before a round."""

# How the bytes of a request are judged.
EXACT = 0
EXACT_OR_ZERO = 1  # beyond the file's stable part, a byte that is just being written may be 0
ANY_RIGHT = 2  # the request failed: a byte is right, or 0 as above, or was not touched
UNTOUCHED = 3

# Columns of an expectation.
AT = 0  # offset in the destination; ascending
LENGTH = 1
FILE = 2  # number
BEGIN = 3  # offset in the file
STABLE = 4  # bytes of the file that nothing changes
RULE = 5
EXPECTATION_WORDS = 6

_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_DOWN, _TOP, _HALF = np.uint64(29), np.uint64(56), np.uint64(32)


@njit(nogil=True)
def byte_at(file: Any, offset: Any) -> Any:
    """Return the byte of a file at an offset (the mixing of splitmix64)."""
    word = (np.uint64(file) << _HALF ^ np.uint64(offset)) * _FIRST
    word = (word ^ word >> _DOWN) * _SECOND
    return np.uint8(word >> _TOP)


@njit(nogil=True)
def fill(into: Any, file: Any, start: Any) -> None:
    """Write the bytes of a file from `start` on."""
    for i in range(len(into)):
        into[i] = byte_at(file, start + i)


@njit(nogil=True)
def find_wrong(memory: Any, expectations: Any) -> Any:
    """Return the first offset in `memory` that holds what it must not, and its expectation.

    Parameters
    ----------
    memory : array of uint8
    expectations : array of int64, shape (n, EXPECTATION_WORDS)
        By ascending AT; what lies between them must be GUARD.

    Returns
    -------
    (int, int)
        -1, -1 where all is right; the number is -1 too for a byte that no request covers.
    """
    position = 0
    for n in range(len(expectations)):
        wanted = expectations[n]
        while position < wanted[AT]:
            if memory[position] != GUARD:
                return position, -1
            position += 1
        rule = wanted[RULE]
        for i in range(wanted[LENGTH]):
            found = memory[position]
            place = wanted[BEGIN] + i
            ok = rule != UNTOUCHED and found == byte_at(wanted[FILE], place)
            ok = ok or (rule >= ANY_RIGHT and found == GUARD)
            ok = ok or (
                rule in (EXACT_OR_ZERO, ANY_RIGHT) and found == 0 and place >= wanted[STABLE]
            )
            if not ok:
                return position, n
            position += 1
    while position < len(memory):
        if memory[position] != GUARD:
            return position, -1
        position += 1
    return -1, -1
