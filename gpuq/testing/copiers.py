"""A copier whose copies end when a test says so, or fail, or cannot be seen to end.

A late copy moves its bytes when it is seen complete, not before: a buffer that was given away
too early brings another piece's bytes, and a flag that was set too early shows missing ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpuq.compiling import implements
from gpuq.host.copier import (
    COPY_DONE,
    COPY_FAILED,
    COPY_UNCERTAIN,
    COPY_UNDER_WAY,
    look_at_copy,
    start_copy,
)
from gpuq.host.libc import copy_memory
from gpuq.ordering import load_acquire, store_release

# How a copy goes.
AT_ONCE = 0
LATE = 1  # ends when its lease's entry of `ends` is 1
REFUSED = 2  # nothing was started
UNCERTAIN = 3  # started, and nobody can see how it goes
LATE_FAILURE = 4  # like LATE, but fails in the end
LATE_UNCERTAIN = 5

# Words, all of the copier.
STARTED = 0
ENDED = 1
WORDS = 8

_WHAT, _TO, _FROM, _NBYTES = range(4)


class ScriptedCopier(NamedTuple):
    """The script and the copies under way.

    Attributes
    ----------
    words : array of int64, shape (WORDS,)
    script : array of int64
        How each copy goes, in the order in which they start; the last entry repeats.
    ends : array of int64, shape (leases,)
        The test's: whether a lease's late copy may end; set back when it does.
    copies : array of int64, shape (leases, 4)
    """

    words: Any
    script: Any
    ends: Any
    copies: Any


def make_scripted_copier(leases: int, script: Any = (AT_ONCE,)) -> ScriptedCopier:
    """Build a copier for `leases` leases."""
    return ScriptedCopier(
        words=np.zeros(WORDS, dtype=np.int64),
        script=np.array(script, dtype=np.int64),
        ends=np.zeros(leases, dtype=np.int64),
        copies=np.zeros((leases, 4), dtype=np.int64),
    )


@implements(start_copy, ScriptedCopier)
def _start(copier: Any, lease: Any, kind: Any, destination: Any, source: Any, nbytes: Any) -> Any:
    number = copier.words[STARTED]
    what = copier.script[min(number, len(copier.script) - 1)]
    store_release(copier.words, STARTED, number + 1)
    if what == REFUSED:
        return COPY_FAILED
    if what == UNCERTAIN:
        return COPY_UNCERTAIN
    if what == AT_ONCE:
        copy_memory(destination, source, nbytes)
        return COPY_DONE
    copy = copier.copies[lease]
    copy[_WHAT] = what
    copy[_TO] = destination
    copy[_FROM] = source
    copy[_NBYTES] = nbytes
    return COPY_UNDER_WAY


@implements(look_at_copy, ScriptedCopier)
def _look(copier: Any, lease: Any) -> Any:
    if load_acquire(copier.ends, lease) == 0:
        return COPY_UNDER_WAY
    store_release(copier.ends, lease, 0)
    store_release(copier.words, ENDED, copier.words[ENDED] + 1)
    copy = copier.copies[lease]
    if copy[_WHAT] == LATE_FAILURE:
        return COPY_FAILED
    if copy[_WHAT] == LATE_UNCERTAIN:
        return COPY_UNCERTAIN
    copy_memory(copy[_TO], copy[_FROM], copy[_NBYTES])
    return COPY_DONE
